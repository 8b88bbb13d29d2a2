"""ASHA (Li et al. 2020) over the points of a sweep, by Ray Tune: a trial that is behind the others ends early."""

import math
from pathlib import Path
from typing import Any

from locater.errors import refusal
from locater.records import write_json

from .folder import Sweep, Tell, open_sweep


def run_trials(sweep: Sweep, *, tell: Tell) -> None:
    """Every missing point is a trial; one that is ended early has a row with what it came to, and says so."""
    if sweep.kind != "train":
        raise refusal("a sweep of locater train for --asha", sweep.kind, "leave out --asha")
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    missing, folder = sweep.missing(), str(sweep.folder.resolve())
    if not missing:
        return
    scheduler = ASHAScheduler(time_attr="validation", metric="loss", mode="min", max_t=10**6, grace_period=1)
    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space={"folder": folder, "number": tune.grid_search(missing)},
        tune_config=tune.TuneConfig(scheduler=scheduler),
        run_config=tune.RunConfig(
            storage_path=str(sweep.folder.resolve() / "tune"),
            failure_config=tune.FailureConfig(max_failures=3),
            verbose=0,
        ),
    )
    tuner.fit()
    for number in sweep.missing():
        _keep_stopped(sweep, number)
    tell(len(sweep.points) - len(sweep.missing()), len(sweep.points))


def trial(config: dict[str, Any]) -> None:
    """One validation after the other, each reported; the last writes the row, as every other worker does."""
    import torch
    from ray import tune

    from ...train.metrics import METRICS, read_rows
    from ..trained import advance, measure

    torch.set_num_threads(1)
    sweep = open_sweep(Path(config["folder"]))
    point = sweep.points[config["number"]]
    place = sweep.place(point)
    place.mkdir(parents=True, exist_ok=True)
    while not advance(point, place):
        rows = [row for row in read_rows(place / METRICS) if row["kind"] == "validation"]
        tune.report({"loss": rows[-1]["loss"] if rows else math.inf, "validation": len(rows)})
    sweep.work(measure, only=[config["number"]])
    result = sweep.row(point).get("result", {})
    tune.report({"loss": result.get("best_loss", math.inf), "validation": 10**6})


def _keep_stopped(sweep: Sweep, number: int) -> None:
    from ..trained import result

    point = sweep.points[number]
    found = result(sweep.place(point), is_done=False)
    write_json({"point": point, "result": found}, sweep.path(point))
