"""What the clipped linear softmax of the theory costs: how far it is from the true one, and where its words differ."""

import math
from pathlib import Path
from typing import Any

import torch

from locater.records import Json
from locater.theory import clipped_softmax, monte_carlo, regimes

from .statistics import Finding, corrected, spearman
from .study import Answer, Figure, Study
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
    distance = clipped_softmax.clipping_error(matrix, one, **options)
    clipped = monte_carlo.profile(matrix, one, **options).mean
    true = true_profile(matrix, length=length, num_walks=walks, generator=generator)
    return {
        "distance": float(distance.mean),
        "distance_error": float(distance.standard_error),
        "regime": regimes.classify(clipped),
        "softmax_regime": regimes.classify(true),
        "late": float(lateness(clipped)),
        "softmax_late": float(lateness(true)),
    }


def true_profile(matrix: torch.Tensor, *, length: int, num_walks: int, generator: torch.Generator) -> torch.Tensor:
    """How often token t takes part in the true softmax of the last query, as ρ_t says it of the clipped one."""
    walk = torch.randn(num_walks, length, len(matrix), generator=generator, dtype=torch.float64).cumsum(1)
    logits = (walk @ matrix @ walk[:, -1, :, None])[..., 0] / math.sqrt(len(matrix))
    p = logits.softmax(-1)
    uniform = (1 - 1 / length) / length
    return (p * (1 - p) >= TAKES_PART * uniform).double().mean(0)


def lateness(profile: torch.Tensor) -> torch.Tensor:
    """Where the profile's mass is: 0 at the first token, 1 at the last, ½ for a uniform one and for none at all."""
    positions = torch.linspace(0, 1, len(profile), dtype=profile.dtype)
    total = profile.sum()
    return (profile * positions).sum() / total if total > 0 else torch.tensor(0.5)


def conclude(rows: list[Json]) -> Answer:
    close = [row for row in rows if row["distance"] < CLOSE]
    agree = [row for row in rows if row["regime"] == row["softmax_regime"]]
    agree_close = [row for row in close if row["regime"] == row["softmax_regime"]]
    both = spearman([row["late"] for row in rows], [row["softmax_late"] for row in rows])
    largest = max((row["eta"] * math.sqrt(row["length"]) for row in close), default=0.0)
    found = corrected(
        [
            Finding("distance of the two softmaxes", "over √T·η/λ", scale_and_distance(rows), "relation"),
            Finding("where the true one has its signal", "over where the clipped one has it", both, "relation"),
        ]
    )
    only = f", all with √T·η/λ ≤ {largest:.2g}" if close else ""
    return Answer(
        f"The two softmaxes put at least {1 - CLOSE:.0%} of their mass on the same tokens on {len(close)} of "
        f"{len(rows)} points{only}; with that scale their distance {_said(found[0])} (rank correlation, Holm).",
        f"The theory's word is the true softmax's too on {len(agree)} of {len(rows)} points ({len(agree_close)} of the "
        f"{len(close)} close ones), and with the place in the text where the theory has its signal, the "
        f"true one's {_said(found[1])}.",
        found,
    )


def _said(one: Finding) -> str:
    return f"{one.verdict} ({one.estimate})" if one.estimate.is_seen else f"was compared: {one.verdict}"


def scale_and_distance(rows: list[Json]):
    return spearman([row["eta"] * math.sqrt(row["length"]) for row in rows], [row["distance"] for row in rows])


STUDY = Study(
    question="What does the theory's piecewise linear softmax cost; where does its regime differ from the true one's?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("eta", "distance", "xi", "length", "η/λ", "distance of the two softmaxes", True, "ξ", "T ="),
    budget="some minutes of one core",
    doubt="Another definition of taking part in a softmax than half of the uniform derivative.",
)
