"""Read what commands wrote: JSON documents, lines of metrics or of a monitor, a run's folder. Knows no torch."""

from pathlib import Path
from typing import Any

from ..errors import refusal, within
from ..records import as_written, read_json, read_lines
from .stories import MONITOR, STEPS, steps_of
from .views import READERS, Document

METRICS = "metrics.jsonl"
RUNS = "locater.runs/1"
STUDY = "locater.study/1"
SWEEP = "locater.sweep/1"
KNOWN = (*READERS, RUNS, STUDY, SWEEP)

PARTS = {
    RUNS: ("arms", "left_out", "score", "step", "folder", "against"),
    SWEEP: ("folder", "rows"),
    STUDY: ("question", "answer", "figure", "rows", "failures"),
}


def is_record(path: Path) -> bool:
    """Tell whether a source is something that a command wrote, and not a model."""
    return path.suffix in (".json", ".jsonl") or (path / METRICS).is_file()


def read_record(path: Path) -> Document:
    """The document of one file or run's folder; refuses what is half-written, foreign or newer."""
    path = path / METRICS if path.is_dir() else path
    if path.suffix == ".jsonl":
        rows = read_lines(path, constant=_absent)
        with within(str(path)), as_written(path):
            return _steps_of_lines(rows, str(path.parent if path.name == METRICS else path))
    document = read_json(path, constant=_absent)
    with within(str(path)):
        return check_document(document)


def _absent(word: str) -> None:
    """NaN and infinity are not JSON: what has no value is absent."""


def check_document(document: Any) -> Document:
    """A document whose schema this version knows, with the parts that its schema promises."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith("locater."):
        raise refusal("a document of locater", f"schema {schema!r}", "give what --json wrote")
    if schema not in KNOWN:
        family, _, version = schema.partition("/")
        newer = any(known.split("/")[0] == family for known in KNOWN) and version.isdigit()
        remedy = "update locater" if newer else "give a scan, compare, predict or runs document"
        raise refusal(f"one of {', '.join(KNOWN)}", schema, remedy)
    with as_written(f"a whole {schema} document"):
        if schema in READERS:
            READERS[schema](document)
        for part in PARTS.get(schema, ()):
            document[part]  # noqa: B018
        [(arm["arm"], arm["quantities"], arm["curves"], arm["seeds"]) for arm in document.get("arms", ())]
    return document


def _steps_of_lines(rows: list[Document], source: str) -> Document:
    """Read lines of `locater train` or of a monitor as one document of steps."""
    if rows and all(row.get("schema") == MONITOR for row in rows):
        return check_document(steps_of(rows, source))
    steps = [row for row in rows if row.get("kind") == "validation" and row.get("heads")]
    if not steps:
        raise refusal("validations of locater train with heads, or reports of a monitor", f"{len(rows)} other lines")
    # A watched run keeps an alarm as a sentence.
    notes = [f"step {row['step']}: {alarm}" for row in rows for alarm in row.get("alarms", ())]
    return check_document({"schema": STEPS, "source": source, "steps": steps, "course": _course(rows), "notes": notes})


def _course(rows: list[Document]) -> dict[str, list[list[float]]]:
    """The losses of a run as pairs of step and value: what people look for first."""
    wanted = (("train", "loss", "training loss"), ("validation", "loss", "held-out loss"))
    found = {}
    for kind, name, words in (*wanted, ("validation", "perplexity", "held-out perplexity")):
        here = [row for row in rows if row.get("kind") == kind]
        pairs = [[row["step"], row[name]] for row in here if isinstance(row.get(name), int | float) and "step" in row]
        if len(pairs) > 1:
            found[words] = pairs
    return found
