"""Points that are training runs: measured by the trainer, resumed where they stand, compared by arm and seed."""

from dataclasses import replace
from pathlib import Path

from locater.errors import missing, refusal
from locater.records import Json

from ..train import run
from ..train.config import make_config
from ..train.loader import load
from ..train.metrics import METRICS, read_metrics
from ..train.observe import directions
from .runs import QUANTITIES
from .statistics import Finding, MeanEstimate, corrected, paired
from .sweep.folder import Point

Rows = list[Json]


def measure(point: Point, place: Path) -> Json:
    """Train, or go on, in the point's folder; SIGTERM saves, and ends the worker without a row."""
    if not _go_on(point, place).is_done:
        raise KeyboardInterrupt
    return result_of_run(place)


def advance(point: Point, place: Path) -> bool:
    """Train to the next validation; whether that was the last."""
    rows = [row for row in read_metrics(place / METRICS) if row["kind"] == "validation"]
    every = make_config(point["preset"], **point["options"]).loop.validate_every
    return _go_on(point, place, stop_after=(rows[-1]["step"] if rows else 0) + every).is_done


def _go_on(point: Point, place: Path, *, stop_after: int | None = None) -> run.Outcome:
    config = make_config(point["preset"], seed=point["seed"], **point["options"])
    if (place / run.CONFIG).exists():
        kept = run.read_run_config(place)
        if replace(kept, data=config.data) != config:
            raise refusal(f"the run of its point in {place}", "one of another config", "move the folder elsewhere")
        return run.resume(place, stop_after=stop_after, say=lambda sentence: None)
    return run.start(config, place, stop_after=stop_after, say=lambda sentence: None)


def result_of_run(folder: Path, *, is_done: bool = True) -> Json:
    """Summarise a run: its best and its last validation, and how many directions its W has left."""
    rows = [row for row in read_metrics(folder / METRICS) if row["kind"] == "validation"]
    if not rows:
        raise missing(f"a validation in {folder / METRICS}")
    best, last = min(rows, key=lambda row: row["loss"]), rows[-1]
    found: Json = {"step": last["step"], "best_step": best["step"], "best_loss": best["loss"]}
    found |= {"is_done": is_done, "course": {str(row["step"]): row["loss"] for row in rows}}
    for name, quantity in QUANTITIES.items():
        try:
            found[name] = quantity.read(last)
        except (KeyError, ArithmeticError):
            continue  # an exploded head has no spectrum
    weights = folder / run.MODEL
    return found | ({"directions": directions(load(weights))} if weights.exists() else {})


def by_seed(rows: Rows, condition: str, arm: str, quantity: str) -> dict[int, float]:
    some = [row for row in rows if (row["condition"], row["arm"]) == (condition, arm) and quantity in row]
    return {row["seed"]: row[quantity] for row in some}


def differences(rows: Rows, quantity: str, *, against: str = "none") -> dict[tuple[str, str], MeanEstimate]:
    """Paired differences of every arm to one, within each condition, by seed."""
    pairs = dict.fromkeys((row["condition"], row["arm"]) for row in rows if row["arm"] != against)
    return {
        (condition, arm): paired(by_seed(rows, condition, arm, quantity), by_seed(rows, condition, against, quantity))
        for condition, arm in pairs
    }


def findings(rows: Rows, quantity: str, what: str, *, against: str = "none") -> list[Finding]:
    """One for each arm and condition against another arm, corrected for how many they are."""
    found = differences(rows, quantity, against=against)
    return corrected([Finding(what, _named(condition, arm), one) for (condition, arm), one in found.items()])


def _named(condition: str, arm: str) -> str:
    return f"{arm} with {condition}" if condition else arm
