"""The points of a sweep as tasks of a Ray cluster, whose nodes share the folder; or as trials that ASHA ends early."""

import logging
import os
from pathlib import Path
from typing import Any

from locater.errors import BadArguments, refusal

from .folder import Sweep, Tell, open_sweep

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


def measure_all(sweep: Sweep, engine: str, *, jobs: int, asha: bool = False, tell: Tell = lambda *_: None) -> None:
    """Every missing point, one processor each; a task whose worker dies is begun again, and its run goes on."""
    ray = _connected(engine, jobs)
    try:
        if asha:
            from .asha import run_trials

            run_trials(sweep, tell=tell)
        else:
            _tasks(ray, sweep, tell)
    finally:
        ray.shutdown()


def check(engine: str | None) -> None:
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
        raise refusal("Ray, for --on ray", "none", 'install it with: pip install "locater[ray]"') from None
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
