"""Evidence for each column of a scan: attention that was measured on text, model by model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

from locater.behaviour import looks
from locater.head import Head
from locater.prediction.predict import RANDOM, Text, predict
from locater.prediction.result import mean_absolute_error, spearman
from locater.prediction.windows import Effort
from locater.records import Json, as_written, read_json, write_json
from locater.scanning.estimate import LENGTH, in_texts_of
from locater.scanning.rows import HeadRow
from locater.scanning.scan import scan
from locater.scanning.source import heads

from .words import HALF, Judged, interval

MEASURED = ("near_mass_beyond_first", "normalised_entropy", "sink_mass")
THEORY = ("xi", "localisation")
ENOUGH = 0.8  # of the heads that a word is said of
# What the words of the theory would mean of near mass, if they were words of behaviour.
REGIMES = {"late": "near", "early": "far"}
ROTARY, TABLES = "rotary decoders", "other positions"
Numbers = Sequence[Sequence[float]]  # per head, in the order of MEASURED


@dataclass(frozen=True)
class Reading:
    """Text that the models are measured on, in windows of a fixed length, or a text in every line."""

    text: str | PathLike[str] | None = None
    by_line: bool = False
    window: int = Effort.window

    @property
    def effort(self) -> Effort:
        """Effort with the default number of tokens, in windows of another length."""
        whole = Effort()
        counts = (round(count * whole.window / self.window) for count in (whole.calibration, whole.test))
        return Effort(self.window, *(max(1, count) for count in counts))

    def predict(self, source: str) -> Json:
        return predict(source, text=Text(self.text, by_line=self.by_line), effort=self.effort).to_json()

    def run_on_random_ids(self, source: str) -> Json:
        return predict(source, text=RANDOM, effort=self.effort).to_json()


def name_of(source: str) -> str:
    """The folder's name, or the file's without its suffix.

    >>> name_of("models/tiny.gguf"), name_of("models/all-MiniLM-L6-v2/")
    ('tiny', 'all-MiniLM-L6-v2')
    """
    path = Path(source)
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def evidence(source: str, folder: Path, reading: Reading) -> Json:
    """One model: predicted, measured and probed once, kept in the folder, and held against a scan of today.

    What was measured before is not measured again, so a stopped study goes on, and a new estimate costs a scan.
    """
    place = folder / name_of(source)
    predicted = _kept(place / "predict.json", lambda: reading.predict(source))
    probed = _kept(place / "random.json", lambda: reading.run_on_random_ids(source))
    first = next(heads(source))
    found = scan(source).heads
    rows = {(row.block, row.layer, row.head): _of_length(row, reading.window, first) for row in found}
    kind = ROTARY if first.rotary is not None and first.lookahead == 0 else TABLES
    with as_written(place):
        result = _joined(name_of(source), rows, predicted, probed) | {"kind": kind}
        write_json(result, place / "row.json")
    return result


def _joined(name: str, rows: dict[tuple[str, int, int], HeadRow], predicted: Json, probed: Json) -> Json:
    """The row of one model: a scan held against what was measured and probed."""
    own = {_place(head): head["measured"] for head in probed["heads"]}
    places = [_place(head) for head in predicted["heads"]]
    result = compared(
        name,
        [rows[place] for place in places],
        measured=[_numbers(head["measured"]) for head in predicted["heads"]],
        probed=[_numbers(own[place]) for place in places],
        predicted=[_numbers(head["predicted"]) for head in predicted["heads"]],
    )
    text = Path(predicted["text"]).name
    result |= {"text": text, "window": predicted["window"], "loss": predicted["loss"]}
    result["ceiling"] = {name: predicted["ceiling"][name] for name in MEASURED} if "ceiling" in predicted else None
    return result


def kept_rows(folder: Path) -> list[Json]:
    """Every model that the folder has a row of, rotary decoders first."""
    rows = [read_json(path) for path in sorted(folder.glob("*/row.json"))]
    with as_written(folder):
        return sorted(rows, key=lambda row: (row["kind"] != ROTARY, row["model"].lower()))


def _kept(path: Path, make: Callable[[], Json]) -> Json:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(make(), path)
    return read_json(path)


def _place(head: Json) -> tuple[str, int, int]:
    return head["block"], head["layer"], head["head"]


def _numbers(head: Json) -> list[float]:
    return [head[name] for name in MEASURED]


def _of_length(row: HeadRow, window: int, head: Head) -> HeadRow:
    """The row with its estimate for texts as long as the measured ones: they are what it is judged on."""
    if row.estimated_near_mass is None or window == LENGTH:
        return row

    def own(near: float) -> float:
        return in_texts_of(window, near, both=head.lookahead != 0)

    low, high = row.estimated_near_mass_interval or (None, None)
    interval = None if low is None or high is None else (own(low), own(high))
    return replace(row, estimated_near_mass=own(row.estimated_near_mass), estimated_near_mass_interval=interval)


def compared(
    name: str, rows: Sequence[HeadRow], *, measured: Numbers, probed: Numbers | None, predicted: Numbers | None
) -> Json:
    """Rank correlations of every column with what was measured, errors, and how often each word was right."""
    near = [numbers[0] for numbers in measured]
    estimated = [row.estimated_near_mass for row in rows]
    known = [(value, own) for value, own in zip(estimated, near, strict=True) if value is not None]
    said = [looks(row.estimated_near_mass) if row.estimated_near_mass_interval else None for row in rows]
    return {
        "model": name,
        "heads": len(rows),
        "theory": {column: spearman([getattr(row, column) for row in rows], near) for column in THEORY},
        "estimate": spearman(*zip(*known, strict=True)) if known else None,
        "estimate_error": mean_absolute_error(*zip(*known, strict=True)) if known else None,
        "covered": _covered(rows, near),
        "probe": _ranks(probed, measured),
        "prediction": _ranks(predicted, measured),
        "words": {word: _agreement(said, near, word) for word in ("near", "far")},
        "regimes": {
            regime: _agreement([REGIMES.get(row.regime) for row in rows], near, word)
            for regime, word in REGIMES.items()
        },
    }


def _covered(rows: Sequence[HeadRow], near: Sequence[float]) -> tuple[int, int]:
    """Count the heads within their interval, among those that have one."""
    pairs = [(row.estimated_near_mass_interval, own) for row, own in zip(rows, near, strict=True)]
    within = [low <= own <= high for (low, high), own in ((one, own) for one, own in pairs if one is not None)]
    return sum(within), len(within)


def _ranks(numbers: Numbers | None, measured: Numbers) -> dict[str, float | None] | None:
    if numbers is None:
        return None
    columns = zip(MEASURED, zip(*numbers, strict=True), zip(*measured, strict=True), strict=True)
    return {name: spearman(one, other) for name, one, other in columns}


def _agreement(words: Sequence[str | None], near: Sequence[float], word: str) -> tuple[int, int]:
    """Count the heads for which the word is right, and the heads that it was said of."""
    called = [own for one, own in zip(words, near, strict=True) if one == word]
    right = sum((own >= HALF) == (word == "near") for own in called)
    return right, len(called)


def real_data_page(rows: Sequence[Json]) -> str:
    """The tables of `docs/evidence.md`."""
    with as_written("rows of models"):
        return "\n\n".join([_ranks_table(rows), _words_table(rows), _exceptions(rows)])


def _ranks_table(rows: Sequence[Json]) -> str:
    heading = (
        "| model | heads | ξ | localisation | estimate (error, in interval) | random ids: near, entropy, sink "
        "| text: near, entropy, sink | at most |\n|---|---|---|---|---|---|---|---|"
    )
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        lines += [f"| *{kind}* | | | | | | | |", *map(_ranks_line, own), _medians_line(f"median of {len(own)}", own)]
    return "\n".join([heading, *lines, _medians_line("**median of all**", rows)])


def _ranks_line(row: Json) -> str:
    theory = " | ".join(_cell(row["theory"][name]) for name in THEORY)
    covered, count = row["covered"]
    estimate = f"{_cell(row['estimate'])} ({_cell(row['estimate_error'])}, {covered / count:.0%})" if count else "–"
    return (
        f"| {row['model']} | {row['heads']} | {theory} | {estimate} | {_three(row['probe'])} "
        f"| {_three(row['prediction'])} | {_three(row.get('ceiling'))} |"
    )


def _medians_line(name: str, rows: Sequence[Json]) -> str:
    cells = [_median(row["estimate"] for row in rows)]
    for kind in ("probe", "prediction"):
        known = [row[kind] for row in rows if row[kind]]
        cells.append(", ".join(_median(one[number] for one in known) for number in MEASURED))
    return f"| {name} | | | | {' | '.join(cells)} | |"


def _words_table(rows: Sequence[Json]) -> str:
    kinds = [("words", "near"), ("words", "far"), ("regimes", "late"), ("regimes", "early")]
    heading = (
        "| model | probably near | probably far | theory: late = near? | theory: early = far? |\n|---|---|---|---|---|"
    )
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        lines += [_words_line(row["model"], [row], kinds) for row in own]
        lines.append(_words_line(f"*{kind}*", own, kinds))
    return "\n".join([heading, *lines, _words_line("**all**", rows, kinds)])


def _words_line(name: str, rows: Sequence[Json], kinds: Sequence[tuple[str, str]]) -> str:
    """The shares of some models together, with their interval over models where there are enough."""
    cells = []
    for a, b in kinds:
        right, called = (sum(row[a][b][part] for row in rows) for part in (0, 1))
        judged = {row["model"]: Judged(row[a][b][1], row[a][b][0], 0, 0) for row in rows}
        found = interval(judged)
        cells.append(_share(right, called) + (f" [{found[0]:.0%}, {found[1]:.0%}]" if found else ""))
    return f"| {name} | {' | '.join(cells)} |"


def _exceptions(rows: Sequence[Json]) -> str:
    """Name the models on which a word does not hold."""
    cases = [(row["model"], word, *row["words"][word]) for row in rows for word in ("near", "far")]
    below = [f"{name} ({word}, {right} of {called})" for name, word, right, called in cases if right < ENOUGH * called]
    return f"Taken alone, a word is right of fewer than four in five in: {', '.join(below) or 'none'}."


def _share(right: int, called: int) -> str:
    return f"{right} of {called} ({right / called:.0%})" if called else "–"


def _three(numbers: dict[str, float | None] | None) -> str:
    return "–" if numbers is None else ", ".join(_cell(numbers[name]) for name in MEASURED)


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _median(values: Any) -> str:
    known = [value for value in values if value is not None]
    return _cell(median(known) if known else None)
