"""A sweep as a document that a page shows: arms over seeds, or the answer of a study; of training it needs no torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from locater.errors import refusal
from locater.records import Json, as_written, read_json
from locater.report.reading import check_document, is_record

from ...train.metrics import METRICS
from ..runs import QUANTITIES, Run, compare_all, compare_runs, read_run
from .folder import LIST, Row, Sweep, open_sweep

STUDY = "study.json"


def read_folder(folder: Path) -> Json | None:
    """The document of a sweep's folder, finished or not, or of a folder of runs; None for any other folder."""
    if (folder / LIST).is_file():
        return check_document(sweep_document(folder))
    if not is_record(folder) and any((entry / METRICS).is_file() for entry in folder.iterdir()):
        return compare_runs(folder)
    return None


def read_rows(document: Json) -> Json:
    """The document of what `sweep --json` wrote."""
    return rows_document(document["rows"], document["folder"])


def sweep_document(folder: Path) -> Json:
    """Document of the points measured so far: `locater.study/1` of a study, `locater.runs/1` of training."""
    sweep = open_sweep(folder)
    if sweep.kind == "train":
        return rows_document(sweep.rows(), str(folder), sweep=sweep)
    return _of_study(sweep)


def rows_document(rows: Sequence[Row], source: str, *, sweep: Sweep | None = None) -> Json:
    """Rows of training runs as arms over seeds, in full where the sweep has their metrics; without what failed."""
    with as_written(source):
        failed = [
            {"run": str(row["point"].get("name", "a point")), "error": row["error"]} for row in rows if "error" in row
        ]
        runs = [_run(row, sweep) for row in rows if "result" in row]
        if not runs:
            reason = f"none, and {len(failed)} that failed" if failed else "none"
            raise refusal(f"a finished run in the sweep {source}", reason, "go on with: locater sweep --resume")
        found = compare_all(sorted(runs, key=lambda run: (run.arm, run.seed)), folder=source)
        return found | {"left_out": [*found["left_out"], *failed]}


def _run(row: Row, sweep: Sweep | None) -> Run:
    """Every validation; of a row alone the course of the loss, and every number of the last validation."""
    point, result = row["point"], row["result"]
    if sweep is not None and (sweep.place(point) / METRICS).is_file():
        return replace(read_run(sweep.place(point)), arm=point["arm"], seed=point["seed"])
    validations = {int(step): {"loss": loss} for step, loss in result["course"].items()}
    validations.setdefault(result["step"], {}).update({name: result[name] for name in QUANTITIES if name in result})
    return Run(point["name"], point["arm"], point["seed"], validations, training={})


def _of_study(sweep: Sweep) -> Json:
    """Read the last conclusion where all is done, else conclude again from the rows."""
    written = sweep.folder / STUDY
    if not sweep.missing() and written.is_file():
        return read_json(written)
    from ..study import document

    return document(sweep.kind.removeprefix("study "), sweep.rows(), num_points=len(sweep.points))
