"""Set ξ and η by construction, measure the attention that comes of it: on walks, and on words of a text."""

from pathlib import Path

import torch

from ..records import Json
from .statistics import correlated, holm, spearman
from .study import Figure, Study
from .sweep.folder import Point
from .synthetic import layers, of_xi_and_eta, tokens

D_MODEL, LENGTH, COUNT = 64, 48, 16


def grid(quick: bool) -> list[Point]:
    means, scales = (-4.0, 0.0, 1.0, 4.0), (0.01, 0.1, 1.0)
    if not quick:
        means, scales = (-7.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 7.0), (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    return [
        {"tokens": kind, "xi": xi, "eta": eta, "seed": seed}
        for seed in range(3)
        for kind in ("walk", "text")
        for xi in means
        for eta in scales
    ]


def measure(point: Point, place: Path) -> Json:
    generator = torch.Generator().manual_seed(point["seed"])
    x = tokens(point["tokens"], count=COUNT, length=LENGTH, d_model=D_MODEL, generator=generator)
    matrix = of_xi_and_eta(point["xi"], point["eta"], d_model=D_MODEL).matrix(D_MODEL, generator)
    return layers(x, [matrix], has_norm=False)


def conclude(rows: list[Json]) -> list[str]:
    found = {}
    for kind in dict.fromkeys(row["tokens"] for row in rows):
        some = [row for row in rows if row["tokens"] == kind]
        for x, name in (("eta", "entropy"), ("xi", "entropy"), ("xi", "near_mass")):
            letter, word = {"eta": "η", "xi": "ξ"}[x], name.replace("_", " ")
            found[letter, f"{word} ({kind})"] = spearman([row[x] for row in some], [row[name] for row in some])
    corrected = holm({f"{x}|{y}": one for (x, y), one in found.items()})
    return [correlated(x, y, corrected[f"{x}|{y}"]) for x, y in found] + [
        "p values are corrected by Holm's method; 'text' is real words with random vectors and positions."
    ]


STUDY = Study(
    question="When the spectrum is set by construction, does attention follow ξ and η as the theory says?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("eta", "near_mass", "xi", "tokens", "η/λ", "mass on the last 4 tokens", logarithmic=True),
    budget="a minute of one core",
    doubt="Inputs of trained models are neither walks nor random vectors; no trained model was edited here.",
)
