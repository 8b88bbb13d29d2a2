"""What commands wrote, read back: JSON documents, lines of metrics or of a monitor, a run's folder. Knows no torch."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DEBUG, Refusal, refusal, within
from .monitored import MONITOR, STEPS, steps_of
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
    """Whether a source is something that a command wrote, and not a model."""
    return path.suffix in (".json", ".jsonl") or (path / METRICS).is_file()


def read_record(path: Path) -> Document:
    """The document of one file or run's folder; refuses what is half-written, foreign or newer."""
    path = path / METRICS if path.is_dir() else path
    with within(str(path)):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as reason:
            raise refusal("a file of results", getattr(reason, "strerror", None) or "bytes that are no text") from None
        if path.suffix == ".jsonl":
            return _of_lines(text, str(path.parent if path.name == METRICS else path))
        return check(_parsed(text))


@contextmanager
def as_written(source: str) -> Iterator[None]:
    """Around the drawing of documents that were read: a value of the wrong kind is theirs, and said in a sentence."""
    try:
        yield
    except Refusal:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as reason:
        if os.environ.get(DEBUG):
            raise
        got = f"{type(reason).__name__} ({reason!s:.100})"
        raise refusal(f"values in {source} as locater writes them", got, "write it again with this version") from None


def check(document: Any) -> Document:
    """A document whose schema this version knows, with the parts that its schema promises."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith("locater."):
        raise refusal("a document of locater", f"schema {schema!r}", "give what --json wrote")
    if schema not in KNOWN:
        family, _, version = schema.partition("/")
        newer = any(known.split("/")[0] == family for known in KNOWN) and version.isdigit()
        remedy = "update locater" if newer else "give a scan, compare, predict or runs document"
        raise refusal(f"one of {', '.join(KNOWN)}", schema, remedy)
    try:
        if schema in READERS:
            READERS[schema](document)
        for part in PARTS.get(schema, ()):
            document[part]  # noqa: B018
        [(arm["arm"], arm["quantities"], arm["curves"], arm["seeds"]) for arm in document.get("arms", ())]
    except Refusal:
        raise
    except (ArithmeticError, KeyError, TypeError, ValueError, IndexError, AttributeError) as reason:
        raise refusal(f"a whole {schema} document", f"one damaged at {reason}", "write it again") from None
    return document


def _parsed(text: str) -> Any:
    try:
        # NaN and infinity are not JSON: what has no value is absent.
        return json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as reason:
        raise refusal("whole JSON", f"{reason!s:.80}", "was it still being written?") from None


def _of_lines(text: str, source: str) -> Document:
    """Lines of `locater train` or of a monitor as steps; a last line cut short, as by a killed run, is dropped."""
    lines = text.split("\n")
    rows = [_parsed(line) for line in lines[:-1] if line.strip()]
    if rows and all(isinstance(row, dict) and row.get("schema") == MONITOR for row in rows):
        return check(_whole(rows, source))
    rows = [row for row in rows if isinstance(row, dict)]
    steps = [row for row in rows if row.get("kind") == "validation" and row.get("heads")]
    if not steps:
        raise refusal("validations of locater train with heads, or reports of a monitor", f"{len(rows)} other lines")
    alarms = [alarm | {"step": row["step"]} for row in rows for alarm in row.get("alarms", ()) if "step" in row]
    return check({"schema": STEPS, "source": source, "steps": steps, "course": _course(rows), "alarms": alarms})


def _whole(reports: list[Document], source: str) -> Document:
    try:
        return steps_of(reports, source)
    except (KeyError, TypeError, ValueError) as reason:
        raise refusal("whole reports of a monitor", f"one damaged at {reason}", "write it again") from None


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
