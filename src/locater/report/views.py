"""Documents of any command as views: heads in rows, quantities in columns, models or steps as frames."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import refusal, shown
from ..records import Json
from .stories import MONITOR, describe_accuracy, describe_windows, steps_of

Key = tuple[str, int, int]
MOST_CHARACTERS = 300  # of a string that others wrote
Document = Json
ESTIMATED = "estimated_"  # begins the name of a column that is a guess from the weights
# Columns that are no quantity: names, shapes, and what another column says better.
GENERIC = {"model", "pytorch_model", "checkpoint", "weights", "final", "last", "best", "metrics", "attention"}
APART = {"block", "layer", "head", "key_head", "d_model", "d_head", "regime", "eigenvalues", "curves", "kind"}


@dataclass
class View:
    """The heads of one model, at one or several frames; a column has a list per frame, None where nothing is known."""

    name: str
    facts: dict[str, str]
    heads: list[Key]
    frames: list[str]
    columns: dict[str, list[list[float | None]]]
    regimes: list[list[str | None]]
    records: list[Document] = field(default_factory=list)  # of the last frame, for what only one frame has
    alarms: list[Document] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)  # of a monitor's log, told in sentences
    course: dict[str, list[list[float]]] = field(default_factory=dict)  # pairs of step and value, by name
    accuracy: list[str] = field(default_factory=list)  # sentences on how far to trust words and prediction
    basis: str = ""  # the text and how much of it was measured, as a sentence
    is_pair: bool = False  # two models side by side
    length: int | None = None
    bins: list[list[int]] | None = None
    distances: list[int] | None = None

    @property
    def source(self) -> str:
        return self.facts.get("source", self.name)

    @property
    def called(self) -> str:
        """The name by which others can have the model; MODEL where its source is a place of this machine."""
        is_public = re.fullmatch(r"pip:[\w.-]+|[\w.-]+/[\w.-]+", self.source) and not Path(self.source).exists()
        return self.source if is_public else "MODEL"


def views_of(documents: Sequence[Document]) -> list[View]:
    """A view per document; a prediction joins the scan of the same source, scans of one shape become frames."""
    views: list[View] = []
    for document in documents:
        reader = READERS.get(document["schema"])
        if reader is not None:
            _join(views, reader(document))
    # With its own measurement in view an estimate can be judged; in another view it would contradict.
    others = ([other for other in views if other is not view and _is_of(other, view, views)] for view in views)
    measured = [{name for other in each for name in other.columns} for each in others]
    for view, names in zip(views, measured, strict=True):
        _drop_estimates(view, names)
    return [*views, *_pairs(views)]


def _drop_estimates(view: View, measured: set[str]) -> None:
    """Drop the estimates of numbers that another view has measured of the same heads of the same model."""
    for name in filter(_is_estimate, [*view.columns]):
        plain = name.removeprefix(ESTIMATED)
        if measured & {side + plain + rest for side in ("", "measured_") for rest in ("", "_beyond_first")}:
            del view.columns[name]


def _is_of(other: View, view: View, views: list[View]) -> bool:
    """Tell whether the other view is of the same heads: by source, or as the record of a run that holds the model.

    A record that holds none of the models (a monitor's, say) is taken to be of the only one with such heads.
    """
    if other.heads != view.heads or other.source == view.source:
        return other.heads == view.heads
    if other.facts.keys() - {"source", "step"}:  # no record of a run but another model
        return False
    folder = Path(other.source).parent if Path(other.source).suffix else Path(other.source)
    alike = {one.source for one in views if one.heads == view.heads and any(map(_is_estimate, one.columns))}
    held = {source for source in alike if Path(source).is_relative_to(folder)}
    return view.source in held if held else len(alike) == 1


def _is_estimate(column: str) -> bool:
    return column.startswith(ESTIMATED)


def _pairs(views: list[View]) -> list[View]:
    """Each later model beside the first, as two frames, where both have the same heads."""
    alone = [view for view in views if len(view.frames) == 1]
    return [_side_by_side(alone[0], other) for other in alone[1:] if other.heads == alone[0].heads]


def _side_by_side(first: View, second: View) -> View:
    common = [name for name in first.columns if name in second.columns]
    return View(
        name=f"{first.name} → {second.name}",
        facts={"source": f"{first.source}, {second.source}"},
        heads=first.heads,
        frames=[first.name, second.name],
        columns={name: [first.columns[name][0], second.columns[name][0]] for name in common},
        regimes=[first.regimes[0], second.regimes[0]],
        is_pair=True,
        length=first.length if first.length == second.length else None,
    )


def _join(views: list[View], new: View) -> None:
    for old in views:
        if (
            old.source == new.source
            and len(old.frames) == len(new.frames) == 1
            and not set(old.columns) & set(new.columns)
        ):
            return _add_columns(old, new)
    views.append(new)
    return None


def _add_columns(old: View, new: View) -> None:
    """The columns of the same heads from another command."""
    at = {key: number for number, key in enumerate(new.heads)}
    for name, frames in new.columns.items():
        old.columns[name] = [[frames[0][at[key]] if key in at else None for key in old.heads]]
    for record, key in zip(old.records, old.heads, strict=True):
        if key in at:
            record.update({k: v for k, v in new.records[at[key]].items() if k not in record})
    old.bins, old.accuracy, old.basis = old.bins or new.bins, old.accuracy or new.accuracy, old.basis or new.basis
    old.facts |= {name: value for name, value in new.facts.items() if name not in old.facts}


def _read_scan(document: Document) -> View:
    records = [_with_ratios(record) for record in document["heads"]]
    names = ("source", "family", "format", "coverage")
    return View(
        name=last_part(document["source"]),
        facts={name: str(document[name]) for name in names if name in document},
        heads=[_key(record) for record in records],
        frames=[last_part(document["source"])],
        columns=_columns([records]),
        regimes=[[record.get("regime") for record in records]],
        records=records,
        refused=list(document.get("refused", ())),
        length=document.get("length"),
        distances=document.get("distances"),
    )


def _with_ratios(record: Document) -> Document:
    """A head with what its columns come to: over the temperature, and the symmetry."""
    scale = record.get("temperature") or math.sqrt(record["d_head"])
    found = {"temperature": scale, **record}
    found["eta_over_temperature"] = record["eta"] / scale
    found["trace_over_temperature"] = record["trace"] / scale
    if record.get("symmetry") is None:  # scans of earlier versions, and runs
        norm = record["frobenius_squared"]
        found["symmetry"] = record["trace_of_square"] / norm if norm else 0.0
    return found


def _read_compare(document: Document) -> View:
    sources = document["sources"]
    heads = document["heads"]
    names = ("xi", "eta", "trace", "localisation")
    columns = {name: [[head[name][frame] for head in heads] for frame in range(len(sources))] for name in names}
    columns["moved"] = [[head["moved"] for head in heads]] * len(sources)
    return View(
        name=" → ".join((last_part(sources[0]), last_part(sources[-1]))),
        facts={"source": ", ".join(sources), "family": document["family"], "coverage": document["coverage"][0]},
        heads=[_key(head) for head in heads],
        frames=[last_part(source) for source in sources],
        columns=columns,
        regimes=[[head["regime"][frame] for head in heads] for frame in range(len(sources))],
        is_pair=len(sources) == 2,
    )


def _read_predict(document: Document) -> View:
    records = []
    for head in document["heads"]:
        sides = {f"{side}_{name}": value for side in ("predicted", "measured") for name, value in head[side].items()}
        records.append({k: head[k] for k in ("block", "layer", "head")} | sides | {
            "attention_profile": head["attention_profile"], "logit_profile": head["logit_profile"]
        })  # fmt: skip
    measured = ("text", "window")
    return View(
        name=last_part(document["source"]),
        facts={"source": document["source"]} | {name: str(document[name]) for name in measured},
        heads=[_key(record) for record in records],
        frames=[last_part(document["source"])],
        columns=_columns([records]),
        regimes=[[None] * len(records)],
        records=records,
        refused=list(document.get("left_out", ())),
        accuracy=document.get("accuracy")
        or describe_accuracy(document.get("spearman", {}), document.get("calibration_error", {})),
        basis=describe_windows(*(document[name] for name in READ)) if all(name in document for name in READ) else "",
        bins=document["distance_bins"],
    )


READ = ("text", "window", "windows", "tokens")


def _read_steps(document: Document) -> View:
    """A run's validations, or a monitor's reports: a frame per step, heads by layer and number."""
    by_step = [
        {
            _key(record): _with_ratios(record) if record.keys() >= {"eta", "trace"} else record
            for record in step["heads"]
        }
        for step in document["steps"]
    ]
    heads = sorted({key for step in by_step for key in step})
    frames = [[step.get(key, {}) for key in heads] for step in by_step]
    return View(
        name=last_part(document["source"]),
        facts={"source": document["source"]},
        heads=heads,
        frames=[str(step["step"]) for step in document["steps"]],
        columns=_columns(frames),
        regimes=[[record.get("regime") for record in frame] for frame in frames],
        records=frames[-1] if frames else [],
        alarms=document.get("alarms", []),
        notes=document.get("notes", []),
        story=document.get("story", []),
        course=document.get("course", {}),
    )


def _read_monitor(document: Document) -> View:
    """One report: a single step, named by where it came from."""
    view = _read_steps(steps_of([document], document.get("source", "monitor")))
    view.facts |= {"step": str(document["step"])}
    return view


READERS: dict[str, Callable[[Document], View]] = {
    "locater.scan/1": _read_scan,
    "locater.compare/1": _read_compare,
    "locater.predict/2": _read_predict,
    "locater.steps/1": _read_steps,
    MONITOR: _read_monitor,
}


def _columns(frames: Sequence[Sequence[Document]]) -> dict[str, list[list[float | None]]]:
    """Every number that any head has, the first head's order first."""
    names = dict.fromkeys(
        name
        for frame in frames
        for record in frame
        for name, value in record.items()
        if name not in APART and isinstance(value, int | float) and not isinstance(value, bool)
    )
    return {name: [[_number(record.get(name)) for record in frame] for frame in frames] for name in names}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _key(record: Document) -> Key:
    try:
        return str(record.get("block", "decoder")), int(record["layer"]), int(record["head"])
    except (KeyError, TypeError, ValueError):
        raise refusal("heads with layer and head numbers", f"{record!s:.80}") from None


def mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def last_part(source: str) -> str:
    """The name that people call a source by: the last part of its path, without a file's suffix."""
    *folders, name = [part for part in source.removeprefix("pip:").split("/") if part] or [source]
    for suffix in (".gguf", ".safetensors", ".jsonl", ".json", ".pt", ".pth"):
        name = name.removesuffix(suffix)
    return f"{folders[-1]}/{name}" if name in GENERIC and folders else name or source


def all_shown(value: object) -> Any:
    """Clean every string of a document, keys included: nothing in it hides, turns the line or fills the page."""
    if isinstance(value, str):
        return shown(value, MOST_CHARACTERS)
    if isinstance(value, dict):
        return {shown(key, MOST_CHARACTERS): all_shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [all_shown(one) for one in value]
    return value
