"""What commands wrote, read back: JSON documents, lines of metrics or of a monitor, a run's folder. Knows no torch."""

import json
from pathlib import Path
from typing import Any

from ..errors import Refusal, refusal, within
from .views import READERS, Document

METRICS = "metrics.jsonl"
STEPS = "locater.steps/1"
RUNS = "locater.runs/1"
MONITOR = "locater.monitor/1"
STUDY = "locater.study/1"
KNOWN = (*READERS, RUNS, STUDY)

PARTS = {
    RUNS: ("arms", "left_out", "score", "step", "folder", "against"),
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
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as reason:
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
        return check(_monitored(rows, source))
    steps = [row for row in rows if isinstance(row, dict) and row.get("kind") == "validation" and row.get("heads")]
    if not steps:
        raise refusal("validations of locater train with heads, or reports of a monitor", f"{len(rows)} other lines")
    return check({"schema": STEPS, "source": source, "steps": steps})


def _monitored(rows: list[Document], source: str) -> Document:
    steps, alarms = [], []
    for row in rows:
        heads = [head for layer in row.get("training") or row.get("evaluation") or [] for head in _heads(layer)]
        steps.append({"step": row["step"], "heads": heads})
        alarms += [alarm | {"step": row["step"]} for alarm in row.get("alarms", [])]
    return {"schema": STEPS, "source": source, "steps": steps, "alarms": alarms}


def _heads(layer: Document) -> list[Document]:
    """A monitor's layer as heads: the statistics by head instead of the heads by statistic."""
    found = [{"block": layer["block"], "layer": layer["layer"], "head": head} for head in layer["heads"]]
    for name, values in layer["statistics"].items():
        for record, value in zip(found, values, strict=True):
            record[name] = value
    return found
