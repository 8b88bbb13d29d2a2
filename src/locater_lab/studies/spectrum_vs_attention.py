"""Set ξ and η by construction, measure the attention that comes of it: on walks, on words, and in trained models."""

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from locater.records import Json

from ..rivals import SpectralInitialisation
from .small import SCALE, Ran, observed, tiny, train, validation_loss
from .statistics import Finding, capital, corrected, spearman, tally
from .study import Answer, Figure, Study
from .sweep.folder import Point
from .synthetic import layers, of_xi_and_eta, tokens

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
    return layers(x, [matrix], has_norm=False)


@lru_cache(maxsize=1)
def trained(seed: int, steps: int) -> Ran:
    """The tiny model after so many steps of a run of 300."""
    return train(tiny(seed), until=steps)


def edited(seed: int, steps: int, xi: float, eta: float) -> Json:
    """A copy whose queries are turned and scaled until all heads have this ξ and η; the rest is as it was learned."""
    ran = trained(seed, steps)
    changed = replace(ran, model=deepcopy(ran.model))
    SpectralInitialisation(changed.model, xi=xi, eta=eta)
    return observed(changed) | {"loss": validation_loss(changed), "loss_before": validation_loss(ran)}


def conclude(rows: list[Json]) -> Answer:
    found: list[Finding] = []
    for kind in dict.fromkeys(row["tokens"] for row in rows):
        some = [row for row in rows if row["tokens"] == kind]
        for x, name in (("eta", "entropy"), ("xi", "entropy"), ("xi", "near_mass")):
            what = f"{name.replace('_', ' ')} over {LETTERS[x]}"
            found.append(
                Finding(what, kind, spearman([row[x] for row in some], [row[name] for row in some]), "relation")
            )
    found = corrected(found)
    parts = {what: [one for one in found if one.what == what] for what in dict.fromkeys(one.what for one in found)}
    told = [f"{what}: {tally(some, most=1)}" for what, some in parts.items()]
    return Answer(
        f"{capital(told[0])}; and {told[-1]} (rank correlations over the grid, Holm).",
        f"{capital(told[1])}.",
        found,
    )


LETTERS = {"eta": "η", "xi": "ξ"}
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
