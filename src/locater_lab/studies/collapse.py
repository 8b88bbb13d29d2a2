"""Rank and entropy collapse over the plane of mean and variance: walks and text, depth, norms and sinks."""

import math
from pathlib import Path
from statistics import fmean

import torch

from locater.quantities import LOCALIZED
from locater.records import Json

from .reconcile import ENTROPY_COLLAPSE, RANK_COLLAPSE
from .statistics import matched_difference
from .study import Answer, Figure, Study, Table
from .sweep.folder import Point
from .synthetic import Spectrum, regime, synthetic_layers, tokens

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
            numbers = synthetic_layers(x, matrices, has_norm=point["norm"], sink=point["sink"])
            word = regime(spectrum, length=LENGTH, d_model=D_MODEL)
            found.append({"trace": trace, "deviation": deviation, "regime": word} | numbers)
    return found


def conclude(rows: list[Json]) -> Answer:
    """The share of collapsed points with a word of the theory against those without, matched on the deviation.

    Only |tr W| ≤ λ is compared: beyond it entropy collapses whatever the deviation, and a word is always said.
    """
    variants = list(dict.fromkeys(map(_variant, rows)))
    found = {variant: _differences([row for row in rows if _variant(row) == variant]) for variant in variants}
    same = [variant for variant, words in found.items() if all(not any(seeds) for seeds in words.values())]
    others = [variant for variant in variants if variant not in same]
    told = [
        f"{variant}: {'; '.join(_said(word, seeds) for word, seeds in found[variant].items())}" for variant in others
    ]
    return Answer(
        f"Points that the theory calls localized collapse in rank or entropy as often as others of the same deviation, "
        f"in {len(same)} of {len(variants)} variants (|tr W| ≤ λ, Mantel–Haenszel).",
        f"The share that collapses differs in {'; in '.join(told) or 'none'} (means over seeds, and their range).",
        table=_table(rows, found),
    )


def _differences(rows: list[Json]) -> dict[str, list[float]]:
    """For each word, seed by seed, the matched difference to points that are not localized; without those not known."""
    found: dict[str, list[float]] = {}
    for word in LOCALIZED:
        seeds = [_matched([row for row in rows if row["seed"] == seed], word) for seed in _seeds(rows)]
        known = [difference for difference in seeds if not math.isnan(difference)]
        if known:
            found[word] = known
    return found


def _matched(rows: list[Json], word: str) -> float:
    """Mantel and Haenszel's difference over strata of one deviation."""
    near = [row for row in rows if abs(row["trace"]) <= 1]
    strata = []
    for deviation in sorted({row["deviation"] for row in near}):
        level = [row for row in near if row["deviation"] == deviation]
        sides = ([row for row in level if row["regime"] == word], [row for row in level if not _is_localized(row)])
        strata.append(tuple([is_collapsed(row) for row in side] for side in sides))
    return matched_difference(strata)


def _said(word: str, seeds: list[float]) -> str:
    return f"{word} {fmean(seeds):+.2f} [{min(seeds):+.2f} to {max(seeds):+.2f}]"


def _table(rows: list[Json], found: dict[str, dict[str, list[float]]]) -> Table:
    """The shares themselves beside the matched differences."""
    lines = []
    for variant, words in found.items():
        near = [row for row in rows if _variant(row) == variant and abs(row["trace"]) <= 1]
        sides = [[row for row in near if row["regime"] == word] for word in ("late", "early")]
        shares = [_share(side) for side in (*sides, [row for row in near if not _is_localized(row)])]
        matched = [_said("", words[word]).strip() if word in words else "–" for word in ("late", "early")]
        lines.append([variant, *shares, *matched])
    columns = ("of", "late: collapsed", "early", "not localized", "late − not, matched", "early − not, matched")
    return Table(columns, lines)


def _share(rows: list[Json]) -> str:
    return f"{fmean(is_collapsed(row) for row in rows):.0%} of {len(rows) // len(_seeds(rows))}" if rows else "–"


def _seeds(rows: list[Json]) -> list[int]:
    return sorted({row["seed"] for row in rows})


def _variant(row: Json) -> str:
    layers = f"{row['tokens']} in {row['layers']} layer{'s' if row['layers'] > 1 else ''}"
    return layers + (" with norm" + " and sink" * row["sink"]) * row["norm"]


def _is_localized(row: Json) -> bool:
    return row["regime"] in LOCALIZED


def is_collapsed(row: Json) -> bool:
    return row["entropy"] < ENTROPY_COLLAPSE or row["residual"] < RANK_COLLAPSE


def over_deviation(rows: list[Json]) -> list[Json]:
    """Mark each point as collapsed or not: means over traces and seeds are shares."""
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
