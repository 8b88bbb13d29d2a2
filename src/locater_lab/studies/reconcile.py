"""Rank and entropy together while the eigenvalues' variance falls, in depth: do the collapses exclude each other?"""

from pathlib import Path

import torch

from locater.records import Json

from .statistics import Finding, corrected, spearman, tally, together, wilson
from .study import Answer, Figure, Study
from .sweep.folder import Point
from .synthetic import Spectrum, layers, tokens

D_MODEL, LENGTH, COUNT = 64, 48, 8
ENTROPY_COLLAPSE, RANK_COLLAPSE = 0.25, 0.15


def grid(quick: bool) -> list[Point]:
    deviations = [10 ** (step / 2) for step in (range(-4, 3, 2) if quick else range(-5, 3))]
    return [
        {"deviation": deviation, "trace": trace, "layers": depth, "norm": norm, "seed": seed}
        for seed in range(3)
        for depth in ((1, 4) if quick else (1, 2, 4, 8))
        for norm in (False, True)
        for trace in (0.0, 0.5, 2.0)
        for deviation in deviations
    ]


def measure(point: Point, place: Path) -> Json:
    generator = torch.Generator().manual_seed(point["seed"])
    x = tokens("walk", count=COUNT, length=LENGTH, d_model=D_MODEL, generator=generator)
    spectrum = Spectrum(point["trace"], point["deviation"])
    matrices = [spectrum.matrix(D_MODEL, generator) for _ in range(point["layers"])]
    return layers(x, matrices, has_norm=point["norm"])


def conclude(rows: list[Json]) -> Answer:
    found: list[Finding] = []
    for name in ("entropy", "residual"):
        for norm, trace in sorted({(row["norm"], row["trace"]) for row in rows}):
            some = [row for row in rows if (row["norm"], row["trace"]) == (norm, trace)]
            where = f"{'residual and norm' if norm else 'attention alone'} with tr W = {trace:g} λ"
            one = spearman([row["deviation"] for row in some], [row[name] for row in some])
            found.append(Finding(f"{name} over the deviation", where, one, "relation"))
    found = corrected(found)
    entropy, residual = ([one for one in found if one.what.startswith(name)] for name in ("entropy", "residual"))
    both = [row for row in rows if row["entropy"] >= ENTROPY_COLLAPSE and row["residual"] >= RANK_COLLAPSE]
    depths = sorted({row["layers"] for row in rows})
    shares = together([f"{_share(both, rows, depth)} with {depth}" for depth in depths])
    return Answer(
        f"As the eigenvalues' deviation grows, entropy {tally(entropy, most=1)}, while the rank residual, near 0 where "
        f"rank collapses, {tally(residual, most=1)} (rank correlations over the grid, Holm).",
        f"Points of the grid without either collapse, by the number of layers: {shares}.",
        found,
    )


def _share(some: list[Json], rows: list[Json], depth: int) -> str:
    """With Wilson's interval for as many points as one seed has: seeds share the grid."""
    count, total, seeds = (
        sum(row["layers"] == depth for row in some),
        sum(row["layers"] == depth for row in rows),
        len({row["seed"] for row in rows}),
    )
    low, high = wilson(count / seeds, total / seeds)
    return f"{count / total:.0%} [{low:.0%}, {high:.0%}]"


def both_measures(rows: list[Json]) -> list[Json]:
    return [
        {"deviation": row["deviation"], "layers": row["layers"], "measure": words, "value": row[name]}
        for row in rows
        for name, words in (("entropy", "entropy"), ("residual", "rank residual"))
    ]


STUDY = Study(
    question="Do rank and entropy collapse exclude each other while the spectrum's variance falls, in depth too?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure(
        "deviation",
        "value",
        "measure",
        "layers",
        "√d · deviation of the eigenvalues/λ",
        "mean over the grid",
        logarithmic=True,
        panel_label="layers:",
    ),
    shown=both_measures,
    budget="a minute of one core",
    doubt="Values and feed-forward parts are left out here; trained models have both.",
)
