"""The points of a sweep measured with progress, for the commands that have one."""

from typing import TYPE_CHECKING

from locater.cli.progress import progress

if TYPE_CHECKING:
    from ..studies.sweep.folder import Sweep


def measure_all(sweep: "Sweep", *, jobs: int, retry: bool = False, on: str | None = None, asha: bool = False) -> None:
    """By this machine's processes, or on a Ray cluster."""
    from ..studies.study import measure_for
    from ..studies.sweep import engines, on_ray

    if retry:
        sweep.retry()
    with progress(sweep.folder.name, steps="points") as tell:
        if on is None:
            engines.local(sweep, measure_for(sweep), jobs=jobs, tell=tell)
        else:
            on_ray.measure_all(sweep, on, jobs=jobs, asha=asha, tell=tell)
