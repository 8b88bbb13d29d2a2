"""What each column of a scan says about attention that was measured on text, model by model: the page of evidence."""

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from statistics import median
from typing import Any

from ..prediction.predict import predict
from ..prediction.probe import probe
from ..prediction.result import mean_absolute_error, spearman
from ..records import Json
from ..scanning.findings import looks
from ..scanning.rows import HeadRow
from ..scanning.scan import scan

MEASURED = ("near_mass_beyond_first", "normalised_entropy", "sink_mass")
THEORY = ("xi", "localisation")
HALF = 0.5  # of the mass: more of it is near than far
# What the words of the theory would mean of near mass, if they were words of behaviour.
REGIMES = {"late": "near", "early": "far"}
Numbers = Sequence[Sequence[float]]  # per head, in the order of MEASURED


def evidence(source: str, *, text: str | PathLike[str] | None = None) -> Json:
    """One model: scanned, probed with random ids, predicted from moments, and measured on text."""
    found = predict(source, text=text)
    places = [(head.block, head.layer, head.head) for head in found.heads]
    rows = {(row.block, row.layer, row.head): row for row in scan(source).heads}
    probed = {(head.block, head.layer, head.head): head.numbers for head in probe(source).heads}
    return compared(
        Path(fspath(source)).name,
        [rows[place] for place in places],
        measured=[[getattr(head.measured, name) for name in MEASURED] for head in found.heads],
        probed=[[getattr(probed[place], name) for name in MEASURED] for place in places],
        predicted=[[getattr(head.predicted, name) for name in MEASURED] for head in found.heads],
    )


def compared(
    name: str, rows: Sequence[HeadRow], *, measured: Numbers, probed: Numbers | None, predicted: Numbers | None
) -> Json:
    """Rank correlations of every column with what was measured, errors, and how often each word was right."""
    near = [numbers[0] for numbers in measured]
    estimated = [row.estimated_near_mass for row in rows]
    known = [(value, own) for value, own in zip(estimated, near, strict=True) if value is not None]
    return {
        "model": name,
        "heads": len(rows),
        "theory": {column: spearman([getattr(row, column) for row in rows], near) for column in THEORY},
        "estimate": spearman(*zip(*known, strict=True)) if known else None,
        "estimate_error": mean_absolute_error(*zip(*known, strict=True)) if known else None,
        "probe": _ranks(probed, measured),
        "prediction": _ranks(predicted, measured),
        "words": {word: _agreement([looks(row) for row in rows], near, word) for word in ("near", "far")},
        "regimes": {
            regime: _agreement([REGIMES.get(row.regime) for row in rows], near, word)
            for regime, word in REGIMES.items()
        },
    }


def _ranks(numbers: Numbers | None, measured: Numbers) -> dict[str, float | None] | None:
    if numbers is None:
        return None
    columns = zip(MEASURED, zip(*numbers, strict=True), zip(*measured, strict=True), strict=True)
    return {name: spearman(one, other) for name, one, other in columns}


def _agreement(words: Sequence[str | None], near: Sequence[float], word: str) -> tuple[int, int]:
    """Of the heads that are called so, how many are so, and how many there are."""
    called = [own for one, own in zip(words, near, strict=True) if one == word]
    right = sum((own >= HALF) == (word == "near") for own in called)
    return right, len(called)


def page(rows: Sequence[Json]) -> str:
    """The tables of `docs/evidence.md`."""
    return "\n\n".join([_ranks_table(rows), _words_table(rows)])


def _ranks_table(rows: Sequence[Json]) -> str:
    heading = (
        "| model | heads | ξ | localisation | estimate (error) | random ids: near, entropy, sink "
        "| text: near, entropy, sink |\n|---|---|---|---|---|---|---|"
    )
    lines = [
        f"| {row['model']} | {row['heads']} | {_cell(row['theory']['xi'])} | {_cell(row['theory']['localisation'])} "
        f"| {_cell(row['estimate'])} ({_cell(row['estimate_error'])}) | {_three(row['probe'])} "
        f"| {_three(row['prediction'])} |"
        for row in rows
    ]
    medians = [_median(row["estimate"] for row in rows)]
    for kind in ("probe", "prediction"):
        known = [row[kind] for row in rows if row[kind]]
        medians.append(", ".join(_median(one[name] for one in known) for name in MEASURED))
    return "\n".join([heading, *lines, f"| **median** | | | | {medians[0]} | {medians[1]} | {medians[2]} |"])


def _words_table(rows: Sequence[Json]) -> str:
    kinds = [("words", "near"), ("words", "far"), ("regimes", "late"), ("regimes", "early")]
    heading = (
        "| model | probably near | probably far | theory: late = near? | theory: early = far? |\n|---|---|---|---|---|"
    )
    lines = [f"| {row['model']} | " + " | ".join(_share(*row[a][b]) for a, b in kinds) + " |" for row in rows]
    totals = [[sum(row[a][b][part] for row in rows) for part in (0, 1)] for a, b in kinds]
    return "\n".join([heading, *lines, "| **all** | " + " | ".join(_share(*total) for total in totals) + " |"])


def _share(right: int, called: int) -> str:
    return f"{right} of {called} ({right / called:.0%})" if called else "–"


def _three(numbers: dict[str, float | None] | None) -> str:
    return "–" if numbers is None else ", ".join(_cell(numbers[name]) for name in MEASURED)


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _median(values: Any) -> str:
    known = [value for value in values if value is not None]
    return _cell(median(known) if known else None)
