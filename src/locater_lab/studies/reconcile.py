"""Rank and entropy together while the eigenvalues' variance falls, in depth: do the collapses exclude each other?"""

from pathlib import Path
from statistics import fmean

import torch

from locater.records import Json

from .statistics import Finding, corrected, paired, seed_means, together
from .study import Answer, Figure, Study, Table
from .sweep.folder import Point
from .synthetic import Spectrum, synthetic_layers, tokens

D_MODEL, LENGTH, COUNT = 64, 48, 8
ENTROPY_COLLAPSE, RANK_COLLAPSE = 0.25, 0.15
# The two ends of the deviation that are compared, and the mean that is held against none, in units of λ.
SMALL, LARGE, MEAN = 0.1, 1.0, 0.5
KEYS, MEASURES = ("deviation", "trace", "layers", "norm"), ("entropy", "residual")


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
    return synthetic_layers(x, matrices, has_norm=point["norm"])


def conclude(rows: list[Json]) -> Answer:
    """The interaction of mean and deviation, for it is the paper's claim: a mean helps where the deviation is small."""
    found = corrected([finding for depth, norm in _variants(rows) if (finding := _interaction(rows, depth, norm))])
    deepest = max(row["layers"] for row in rows)
    bare = [row for row in rows if row["layers"] == deepest and not row["norm"]]
    normed = seed_means([row for row in rows if row["norm"]], KEYS, MEASURES)
    collapsed = sum(row["residual"] < RANK_COLLAPSE for row in normed)
    return Answer(
        f"In {deepest} layers of attention alone with nearly equal eigenvalues (deviation ≤ {SMALL} λ): "
        f"{_told(bare, SMALL)}. A mean helps the rank more there than at deviations ≥ {LARGE:g} λ, by "
        f"{next((str(one.estimate) for one in reversed(found) if 'alone' in one.of), '(not measured)')}.",
        f"With a residual stream and norms rank collapses on {collapsed} of {len(normed)} points.",
        found,
        _table(rows),
    )


def _told(rows: list[Json], most: float) -> str:
    """Name what collapses at each trace, by means over deviations and seeds of rank residual and entropy."""
    told = []
    for trace in sorted({row["trace"] for row in rows}):
        some = [row for row in rows if row["trace"] == trace and row["deviation"] <= most]
        if some:
            residual, entropy = (fmean(row[name] for row in some) for name in ("residual", "entropy"))
            fallen = ["rank"] * (residual < RANK_COLLAPSE) + ["entropy"] * (entropy < ENTROPY_COLLAPSE)
            shown = f"rank residual {residual:.2f}, entropy {entropy:.2f}"
            told.append(f"at tr W = {trace:g} λ {together(fallen) or 'nothing'} collapses ({shown})")
    return together(told) or "not measured"


def _interaction(rows: list[Json], depth: int, norm: bool) -> Finding | None:
    """(residual with the mean − without it) at a small deviation, minus the same at a large one, seed by seed."""
    some = [row for row in rows if (row["layers"], row["norm"]) == (depth, norm)]
    gains = [_gain([row for row in some if is_in(row["deviation"])]) for is_in in (_is_small, _is_large)]
    if not all(gains):
        return None
    where = f"{depth} layer{'s' if depth > 1 else ''}, {'residual and norm' if norm else 'attention alone'}"
    return Finding(f"gain from tr W = {MEAN:g} λ at a small deviation − at a large one", where, paired(*gains))


def _gain(rows: list[Json]) -> dict[int, float]:
    """Gain in rank residual by the mean, for each seed that has both."""
    sides = {
        trace: {
            seed: fmean(row["residual"] for row in rows if (row["trace"], row["seed"]) == (trace, seed))
            for seed in {row["seed"] for row in rows if row["trace"] == trace}
        }
        for trace in (0.0, MEAN)
    }
    return {seed: sides[MEAN][seed] - sides[0.0][seed] for seed in sides[MEAN].keys() & sides[0.0].keys()}


def _is_small(deviation: float) -> bool:
    return deviation <= SMALL


def _is_large(deviation: float) -> bool:
    return deviation >= LARGE


def _variants(rows: list[Json]) -> list[tuple[int, bool]]:
    return sorted({(row["layers"], row["norm"]) for row in rows}, key=lambda variant: (variant[1], variant[0]))


def _table(rows: list[Json]) -> Table:
    """Rank residual / entropy by depth and trace, at small and at large deviations."""
    found = []
    for depth, norm in _variants(rows):
        some = [row for row in rows if (row["layers"], row["norm"]) == (depth, norm)]
        for trace in sorted({row["trace"] for row in some}):
            cells = []
            for is_in in (_is_small, _is_large):
                part = [row for row in some if row["trace"] == trace and is_in(row["deviation"])]
                means = [f"{fmean(row[name] for row in part):.2f}" if part else "–" for name in ("residual", "entropy")]
                cells.append(" / ".join(means))
            found.append([str(depth), "yes" if norm else "no", f"{trace:g}", *cells])
    columns = ("layers", "norm", "tr W/λ", f"deviation ≤ {SMALL} λ", f"deviation ≥ {LARGE:g} λ")
    return Table(columns, found)


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
