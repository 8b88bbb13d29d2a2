"""A monitor's reports as steps: heads in rows, alarms with their step, notes."""

from collections.abc import Sequence

from ..records import Json
from .night import tell

MONITOR = "locater.monitor/1"
STEPS = "locater.steps/1"
# What a scan calls by another name.
SAME = {"sigma_1": "sigma"}


def steps_of(reports: Sequence[Json], source: str) -> Json:
    """One document of steps; the heads are those of training, or of evaluation where nothing was trained."""
    steps, alarms, notes = [], [], []
    for report in reports:
        heads = [head for layer in report.get("training") or report.get("evaluation") or [] for head in _heads(layer)]
        steps.append({"step": report["step"], "heads": heads})
        alarms += [alarm | {"step": report["step"]} for alarm in report.get("alarms", [])]
        notes += report.get("notes", [])
    notes = [line.rstrip(".") for report in reports for line in report.get("actions", [])] + notes
    found = {"steps": steps, "alarms": alarms, "notes": list(dict.fromkeys(notes)), "story": tell(reports)}
    return {"schema": STEPS, "source": source, **found}


def _heads(layer: Json) -> list[Json]:
    """A layer as heads: the statistics by head instead of the heads by statistic."""
    found: list[Json] = [{"block": layer["block"], "layer": layer["layer"], "head": head} for head in layer["heads"]]
    columns: dict[str, list] = {**layer["statistics"], **layer.get("weights", {})}
    for name, values in columns.items():
        for record, value in zip(found, values, strict=True):
            record[SAME.get(name, name)] = value
    return found
