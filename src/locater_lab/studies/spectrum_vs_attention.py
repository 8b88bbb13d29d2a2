"""Set ξ and η by construction, measure the attention that comes of it: on walks, on words, and in trained models."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from locater.records import Json
from locater.theory import localisation

from ..rivals import SpectralInitialisation
from .small import SCALE, Ran, observed, tiny, train_small, validation_loss
from .statistics import rank_correlation, seed_means, together
from .study import Answer, Figure, Study, Table
from .sweep.folder import Point
from .synthetic import of_xi_and_eta, synthetic_layers, tokens

D_MODEL, LENGTH, COUNT = 64, 48, 16
STAGES = {"fresh model": 0, "in the middle of training": 100, "trained model": 300}


def grid(quick: bool) -> list[Point]:
    means, scales = (-4.0, 0.0, 1.0, 4.0), (0.01, 0.1, 1.0)
    inside, stages = (-2.0, 0.0, 2.0), {"fresh model": 0, "trained model": 60}
    if not quick:
        means, scales = (-7.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 7.0), (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
        inside, stages = (-2.0, -1.0, 0.0, 1.0, 2.0), STAGES
    synthetic = [
        {"tokens": kind, "xi": xi, "eta": eta, "seed": seed}
        for seed in range(3)
        for kind in ("walk", "text")
        for xi in means
        for eta in scales
    ]
    edited = [
        {"tokens": stage, "steps": steps, "xi": xi, "eta": eta, "seed": seed}
        for seed in range(3)
        for stage, steps in stages.items()
        for xi in inside
        for eta in (0.03, 0.1, 0.3, 1.0, 3.0)
    ]
    return synthetic + edited


def measure(point: Point, place: Path) -> Json:
    if "steps" in point:
        return edited(point["seed"], point["steps"], point["xi"], point["eta"])
    generator = torch.Generator().manual_seed(point["seed"])
    x = tokens(point["tokens"], count=COUNT, length=LENGTH, d_model=D_MODEL, generator=generator)
    matrix = of_xi_and_eta(point["xi"], point["eta"], d_model=D_MODEL).matrix(D_MODEL, generator)
    return synthetic_layers(x, [matrix], has_norm=False)


@lru_cache(maxsize=1)
def _trained(seed: int, steps: int) -> Ran:
    """Return the tiny model after this many steps of a run of 300."""
    return train_small(tiny(seed), until=steps)


def edited(seed: int, steps: int, xi: float, eta: float) -> Json:
    """A copy whose queries are turned and scaled until all heads have this ξ and η; the rest is as it was learned."""
    ran = _trained(seed, steps)
    changed = replace(ran, model=deepcopy(ran.model))
    SpectralInitialisation(changed.model, xi=xi, eta=eta)
    return observed(changed) | {"loss": validation_loss(changed), "loss_before": validation_loss(ran)}


def conclude(rows: list[Json]) -> Answer:
    """Effect sizes over the grid, seeds as one point. Entropy is even in ξ: it is held against |ξ|, at each η apart."""
    kinds = {
        kind: seed_means([row for row in rows if row["tokens"] == kind], ("xi", "eta"), ("entropy", "near_mass"))
        for kind in dict.fromkeys(row["tokens"] for row in rows)
    }
    found = {kind: _effects(some) for kind, some in kinds.items()}
    local = {kind: _theory_agrees(kinds[kind]) for kind in kinds if kind in SYNTHETIC}
    whole = {name: _span([one for effects in found.values() for one in effects[name]]) for name in EFFECTS}
    told = together([f"{_span(effects['entropy over |ξ|'])} ({kind})" for kind, effects in found.items()])
    agreement = together([f"{value:.2f} ({kind})" for kind, value in local.items()])
    return Answer(
        f"In all {len(found)} kinds of input, entropy goes with η (rank correlation {whole['entropy over η']} at fixed "
        f"ξ) and near mass with ξ ({whole['near mass over ξ']} at fixed η).",
        f"Entropy over |ξ| at η ≤ {MODERATE} λ: {told}"
        + (f"; the theory's L against 1 − entropy there {agreement}." if local else "."),
        table=_table(found),
    )


def _effects(points: list[Json]) -> dict[str, list[float]]:
    """Rank correlations at each value of what is fixed; none where it does not vary."""
    moderate = [point for point in points if point["eta"] <= MODERATE]
    beyond = [point for point in points if point["eta"] > MODERATE]
    return {
        "entropy over η": _within(points, "xi", lambda point: point["eta"], "entropy"),
        "near mass over ξ": _within(points, "eta", lambda point: point["xi"], "near_mass"),
        "entropy over |ξ|": _within(moderate, "eta", lambda point: abs(point["xi"]), "entropy"),
        "entropy over |ξ|, η beyond": _within(beyond, "eta", lambda point: abs(point["xi"]), "entropy"),
    }


def _within(points: list[Json], fixed: str, x: Callable[[Json], float], y: str) -> list[float]:
    found = []
    for value in sorted({point[fixed] for point in points}):
        some = [point for point in points if point[fixed] == value]
        found.append(rank_correlation([x(point) for point in some], [point[y] for point in some]))
    return [one for one in found if not math.isnan(one)]


def _theory_agrees(points: list[Json]) -> float:
    """Rank correlation of the theory's localisation with 1 − entropy, at moderate η."""
    some = [point for point in points if point["eta"] <= MODERATE]
    theory = [
        float(
            localisation(of_xi_and_eta(one["xi"], one["eta"], d_model=D_MODEL).profile(length=LENGTH, d_model=D_MODEL))
        )
        for one in some
    ]
    return rank_correlation(theory, [1 - one["entropy"] for one in some])


def _span(values: list[float]) -> str:
    """From the lowest to the highest; one number where they are as good as equal."""
    if not values:
        return "not measured"
    low, high = min(values), max(values)
    return f"{low:+.2f}" if high - low < 0.005 else f"{low:+.2f} to {high:+.2f}"


def _table(found: dict[str, dict[str, list[float]]]) -> Table:
    columns = (*EFFECTS[:3], f"entropy over |ξ|, η > {MODERATE} λ")
    return Table(
        ("rank correlations, lowest to highest", *columns),
        [[kind, *(_span(effects[name]) for name in EFFECTS)] for kind, effects in found.items()],
    )


MODERATE = 0.3
SYNTHETIC = ("walk", "text")
EFFECTS = ("entropy over η", "near mass over ξ", "entropy over |ξ|", "entropy over |ξ|, η beyond")
STUDY = Study(
    question="When the spectrum is set by construction, does attention follow ξ and η as the theory says?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("eta", "near_mass", "xi", "tokens", "η/λ", "mass on the last 4 tokens", True, "ξ"),
    budget="603 points, 9 small models trained: two minutes of one core",
    setting="'text' is real words with random vectors; the models have " + SCALE,
    doubt="Larger trained models, whose inputs have a common mean and whose heads differ.",
)
