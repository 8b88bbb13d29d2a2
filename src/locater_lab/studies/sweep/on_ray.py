"""The points of a sweep as tasks of a Ray cluster, whose nodes share the folder; or as trials that ASHA ends early."""

import logging
import math
import os
from pathlib import Path
from typing import Any

from locater.errors import BadArguments, missing, refusal
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

    from ...train.metrics import METRICS, read_metrics
    from ..trained import advance, measure

    torch.set_num_threads(1)
    sweep = open_sweep(Path(config["folder"]))
    point = sweep.points[config["number"]]
    place = sweep.place(point)
    place.mkdir(parents=True, exist_ok=True)
    while not advance(point, place):
        rows = [row for row in read_metrics(place / METRICS) if row["kind"] == "validation"]
        tune.report({"loss": rows[-1]["loss"] if rows else math.inf, "validation": len(rows)})
    sweep.work(measure, only=[config["number"]])
    result = sweep.row(point).get("result", {})
    tune.report({"loss": result.get("best_loss", math.inf), "validation": 10**6})


def _keep_stopped(sweep: Sweep, number: int) -> None:
    from ..trained import result_of_run

    point = sweep.points[number]
    found = result_of_run(sweep.place(point), is_done=False)
    write_json({"point": point, "result": found}, sweep.path(point))


SCHEME = "ray"
POLL_SECONDS = 0.5
# What workers on other nodes must be told; on this machine they have it anyway.
PASSED_ON = ("PYTHONPATH", "LOCATER_CACHE", "HF_HUB_OFFLINE")


def address_of(engine: str) -> str | None:
    """Address of the cluster's head; None for one of this machine that ends with the sweep.

    >>> address_of("ray://10.0.0.1:6379")
    '10.0.0.1:6379'
    >>> address_of("ray")
    """
    scheme, separator, address = engine.partition("://")
    if scheme != SCHEME or bool(separator) != bool(address):
        raise BadArguments(f"--on expects ray, or ray://HOST:PORT of a cluster's head, got {engine!r}")
    return address or None


def measure_on_ray(sweep: Sweep, engine: str, *, jobs: int, asha: bool = False, tell: Tell = lambda *_: None) -> None:
    """Every missing point, one processor each; a task whose worker dies is begun again, and its run goes on."""
    ray = _connected(engine, jobs)
    try:
        if asha:
            run_trials(sweep, tell=tell)
        else:
            _tasks(ray, sweep, tell)
    finally:
        ray.shutdown()


def check_cluster(engine: str | None) -> None:
    """Refuse an engine that cannot be, before a folder is made for its sweep."""
    if engine is not None:
        address_of(engine)
        _import()


def _import() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise missing("Ray, for --on ray", extra="ray") from None
    return ray


def _connected(engine: str, jobs: int) -> Any:
    ray, address = _import(), address_of(engine)
    own: dict[str, Any] = {} if address else {"num_cpus": jobs, "include_dashboard": False}
    variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": variables},
            **own,
        )
    except ConnectionError as reason:
        raise refusal(f"a Ray cluster at {address}", f"{reason!s:.80}", "start one: ray start --head") from None
    return ray


def _tasks(ray: Any, sweep: Sweep, tell: Tell) -> None:
    """Until no row is missing: a point whose workers keep dying becomes a row too, so this ends."""
    task = ray.remote(num_cpus=1, max_retries=0)(measure_one).options(name="locater-point")
    total = len(sweep.points)
    while missing := sweep.missing():
        waiting = [task.remote(str(sweep.folder.resolve()), number) for number in missing]
        while waiting:
            done, waiting = ray.wait(waiting, timeout=POLL_SECONDS)
            for one in done:
                _settle(ray, one)
            tell(total - len(sweep.missing()), total)


def _settle(ray: Any, one: object) -> None:
    """A dead worker is no failure of the sweep; whatever else a task raises is."""
    try:
        ray.get(one)
    except ray.exceptions.WorkerCrashedError:
        pass
    except ray.exceptions.RayTaskError as reason:
        got = str(reason).strip().splitlines()[-1][:120]
        raise refusal("workers that can measure a point", got, "install locater on every node") from None


def measure_one(folder: str, number: int) -> int:
    """Measure one point as a task, in a process of its own: as every other worker."""
    import torch

    from ..study import measure_for

    torch.set_num_threads(1)
    sweep = open_sweep(Path(folder))
    return sweep.work(measure_for(sweep), only=[number])
