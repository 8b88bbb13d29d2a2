"""Error of the theory's clipped linear softmax: how far it is from the true one, and where its words differ."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from locater.quantities import REGIMES
from locater.records import Json
from locater.theory import monte_carlo, regimes

from .statistics import rank_correlation, together
from .study import Answer, Figure, Study, Table
from .sweep.folder import Point
from .synthetic import of_xi_and_eta

D_MODEL = 64
# Total variation below this: the two softmaxes put nine tenths of their mass on the same tokens.
CLOSE = 0.1
# A token takes part in a softmax while its derivative p(1 − p) is at least this share of the uniform one's.
TAKES_PART = 0.5


def grid(quick: bool) -> list[Point]:
    lengths = (16, 64) if quick else (16, 64, 256)
    scales = (0.01, 0.1, 1.0) if quick else (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    means = (0.0, 2.0, 6.0) if quick else (-6.0, -2.0, 0.0, 2.0, 6.0)
    walks = 100 if quick else 1000
    return [
        {"length": length, "eta": eta, "xi": xi, "walks": walks} for length in lengths for eta in scales for xi in means
    ]


def measure(point: Point, place: Path) -> Json:
    """Distance of the two softmaxes over walks, and the regime of each one's share of walks with a gradient."""
    generator = torch.Generator().manual_seed(1)
    length, walks = point["length"], point["walks"]
    spectrum = of_xi_and_eta(point["xi"], point["eta"], d_model=D_MODEL)
    matrix, one = spectrum.matrix(D_MODEL, generator), torch.eye(D_MODEL, dtype=torch.float64)
    options: dict[str, Any] = dict(length=length, num_walks=walks, generator=generator)
    distance = monte_carlo.clipping_error(matrix, one, **options)
    clipped = monte_carlo.profile(matrix, one, **options).mean
    true = true_profile(matrix, length=length, num_walks=walks, generator=generator)
    return {
        "distance": float(distance.mean),
        "regime": regimes.classify(clipped),
        "softmax_regime": regimes.classify(true),
    }


def true_profile(matrix: torch.Tensor, *, length: int, num_walks: int, generator: torch.Generator) -> torch.Tensor:
    """Frequency of token t in the true softmax of the last query, comparable with ρ_t of the clipped one."""
    walk = torch.randn(num_walks, length, len(matrix), generator=generator, dtype=torch.float64).cumsum(1)
    logits = (walk @ matrix @ walk[:, -1, :, None])[..., 0] / math.sqrt(len(matrix))
    p = logits.softmax(-1)
    uniform = (1 - 1 / length) / length
    return (p * (1 - p) >= TAKES_PART * uniform).double().mean(0)


SCALES: dict[str, Callable[[Json], float]] = {
    "T·η(1 + |ξ|)/λ": lambda row: row["length"] * row["eta"] * (1 + abs(row["xi"])),
    "T·η/λ": lambda row: row["length"] * row["eta"],
    "√T·η/λ": lambda row: math.sqrt(row["length"]) * row["eta"],
}


def conclude(rows: list[Json]) -> Answer:
    """Effect sizes over the grid: which scale orders the distance, and which words the true softmax keeps."""
    distances = [row["distance"] for row in rows]
    ordered = {name: rank_correlation([scale(row) for row in rows], distances) for name, scale in SCALES.items()}
    (best, *others), at = sorted(ordered, key=lambda name: -abs(ordered[name])), len(rows)
    close = [row for row in rows if row["distance"] < CLOSE]
    largest = max((SCALES[best](row) for row in close), default=0.0)
    below = [row for row in rows if SCALES[best](row) <= largest]
    agree, outside = _kept(rows), [row for row in rows if row["regime"] != "uniform"]
    said = {word: sum(row["regime"] == word for row in rows) for word in REGIMES}
    worst = min((word for word in REGIMES if said[word]), key=lambda word: len(_kept(rows, word)) / said[word])
    by_others = together([f"{name} {ordered[name]:.3f}" for name in others])
    return Answer(
        f"The distance of the two softmaxes goes with {best} (rank correlation over {at} points {ordered[best]:.3f}; "
        f"with {by_others}). At least {1 - CLOSE:.0%} of their mass is on the same tokens on {len(close)} points, all "
        f"among the {len(below)} with {best} ≤ {largest:.2g}.",
        f"The theory's word is the true softmax's on {len(agree)} of {at} points, and on {len(_kept(outside))} of "
        f"{len(outside)} that it does not call uniform; *{worst}* on {len(_kept(rows, worst))} of {said[worst]}.",
        table=_words(rows),
    )


def _kept(rows: list[Json], word: str | None = None) -> list[Json]:
    """The points on which both softmaxes have the same word, or this one."""
    return [row for row in rows if row["regime"] == row["softmax_regime"] and word in (None, row["regime"])]


def _words(rows: list[Json]) -> Table:
    """Each word of the theory, how often the true softmax keeps it, and what it says instead."""
    counts = Counter((row["regime"], row["softmax_regime"]) for row in rows)
    found = []
    for word in (word for word in REGIMES if any(said == word for said, _ in counts)):
        total = sum(count for (said, _), count in counts.items() if said == word)
        instead = sorted((-count, true) for (said, true), count in counts.items() if said == word != true)
        told = ", ".join(f"{true} {-count}" for count, true in instead)
        found.append([word, str(total), str(counts[word, word]), told])
    return Table(("the theory's word", "points", "kept by the true softmax", "it says instead"), found)


STUDY = Study(
    question="What does the theory's piecewise linear softmax cost; where does its regime differ from the true one's?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("eta", "distance", "xi", "length", "η/λ", "distance of the two softmaxes", True, "ξ", "T ="),
    budget="some minutes of one core",
    doubt="Another definition of taking part in a softmax than half of the uniform derivative.",
)
