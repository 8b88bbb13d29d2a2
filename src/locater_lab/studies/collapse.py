"""Rank and entropy collapse over the plane of mean and variance: walks and text, depth, norms and sinks."""

from pathlib import Path

import torch

from locater.records import Json
from locater.theory.words import LOCALIZED

from .reconcile import ENTROPY_COLLAPSE, RANK_COLLAPSE
from .statistics import Finding, corrected, paired_shares, tally
from .study import Answer, Figure, Study
from .sweep.folder import Point
from .synthetic import Spectrum, layers, regime, tokens

D_MODEL, LENGTH, COUNT = 64, 48, 8
TRACES = (-2.0, -1.0, -0.5, -0.25, -0.1, 0.0, 0.1, 0.25, 0.5, 1.0, 2.0)


def grid(quick: bool) -> list[Point]:
    """A point is a whole plane: one kind of tokens, depth, norm and sink."""
    return [
        {"tokens": kind, "layers": depth, "norm": norm, "sink": sink, "seed": seed, "rows": 4 if quick else 16}
        for seed in range(3)
        for kind in ("walk", "text")
        for depth in (1, 8)
        for norm, sink in ((False, False), (True, False), (True, True))
    ]


def measure(point: Point, place: Path) -> list[Json]:
    found = []
    for step in range(point["rows"]):
        deviation = 10 ** (-2 + 3 * step / (point["rows"] - 1))
        generator = torch.Generator().manual_seed(point["seed"])
        x = tokens(point["tokens"], count=COUNT, length=LENGTH, d_model=D_MODEL, generator=generator)
        for trace in TRACES:
            spectrum = Spectrum(trace, deviation)
            matrices = [spectrum.matrix(D_MODEL, generator) for _ in range(point["layers"])]
            numbers = layers(x, matrices, has_norm=point["norm"], sink=point["sink"])
            word = regime(spectrum, length=LENGTH, d_model=D_MODEL)
            found.append({"trace": trace, "deviation": deviation, "regime": word} | numbers)
    return found


def conclude(rows: list[Json]) -> Answer:
    """The share of collapsed points, where the theory localises with |tr W| ≤ λ against elsewhere."""
    found = []
    for variant in dict.fromkeys(map(_variant, rows)):
        some = [row for row in rows if _variant(row) == variant]
        shares = paired_shares(_collapsed(some, inside=True), _collapsed(some, inside=False))
        found.append(Finding("share collapsed, localized − elsewhere", variant, shares))
    found = corrected(found)
    bare, others = ([one for one in found if ("norm" in one.of) == has_norm] for has_norm in (False, True))
    return Answer(
        "In attention alone, the share of points that collapse in rank or entropy where the theory says localized "
        f"(and |tr W| ≤ λ), against elsewhere: {tally(bare, most=4)} (Holm).",
        f"With residuals and norms, and with a sink beside them: {tally(others) or 'not measured'}.",
        found,
    )


def _variant(row: Json) -> str:
    layers = f"{row['tokens']} in {row['layers']} layer{'s' if row['layers'] > 1 else ''}"
    return layers + (" with norm" + " and sink" * row["sink"]) * row["norm"]


def _collapsed(rows: list[Json], *, inside: bool) -> dict[int, list[bool]]:
    found: dict[int, list[bool]] = {row["seed"]: [] for row in rows}
    for row in rows:
        if _is_inside(row) == inside:
            found[row["seed"]].append(is_collapsed(row))
    return found


def _is_inside(row: Json) -> bool:
    return row["regime"] in LOCALIZED and abs(row["trace"]) <= 1


def is_collapsed(row: Json) -> bool:
    return row["entropy"] < ENTROPY_COLLAPSE or row["residual"] < RANK_COLLAPSE


def over_deviation(rows: list[Json]) -> list[Json]:
    """Whether each point collapsed: means over traces and seeds are shares."""
    return [
        {"deviation": row["deviation"], "collapsed": float(is_collapsed(row)), "where": _variant(row | {"norm": False})}
        | {"kind": "attention alone" if not row["norm"] else "with norm and sink" if row["sink"] else "with norm"}
        for row in rows
    ]


STUDY = Study(
    question="Where over eigenvalue mean and variance do rank and entropy collapse; does the theory draw the border?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure(
        "deviation",
        "collapsed",
        "kind",
        "where",
        "√d · deviation of the eigenvalues/λ",
        "share collapsed",
        logarithmic=True,
    ),
    shown=over_deviation,
    budget="36 planes of 176 points: a minute of one core",
    doubt="Text here is real words with random vectors; a trained model's inputs have a common mean.",
)
