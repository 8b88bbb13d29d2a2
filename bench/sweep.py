"""Two processes against one on the same sweep: `python bench/sweep.py`; the bound is 1.8 times the points per second.

Both orders are run, and the better time of each counts: another's work on the machine can only slow one down. What is
timed is the sweep's own work, from the first row's run to the last row: starting and ending Python counts for neither.
Beside it stands the processor's time of all workers: where two take more of it than one, the cores hinder each other,
which no sweep can mend.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from locater_lab.studies.sweep.folder import create

BOUND = 1.8
OPTIONS = dict(data="embedded", tokenizer="bpe", bpe_size=512, context=32, d_model=32, d_feedforward=64)
OPTIONS |= dict(batch=8, warmup=10, validate_every=10_000, validation_windows=64, save_every=10_000)


class Taken(NamedTuple):
    """Seconds of the clock, from the moment at which all are at work to the last row; and of the processor, in all."""

    clock: float
    processor: float


def taken(folder: Path, *, jobs: int, num_points: int, steps: int) -> Taken:
    points = [
        {
            "name": f"run-seed{seed}",
            "arm": "run",
            "seed": seed,
            "preset": "paper",
            "options": OPTIONS | {"steps": steps},
        }
        for seed in range(num_points)
    ]
    sweep = create(folder, "train", points)
    command = [sys.executable, "-m", "locater.cli", "sweep", "--resume", str(folder), "--worker"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    workers = [subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) for _ in range(jobs)]
    _wait(lambda: len(list((folder / "runs").glob("*/metrics.jsonl"))) >= jobs)
    start = time.perf_counter()
    _wait(lambda: not sweep.missing())
    clock = time.perf_counter() - start
    for worker in workers:
        assert worker.wait() == 0
    assert all("result" in row for row in sweep.rows())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _wait(condition) -> None:
    while not condition():
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    chosen = parser.parse_args()
    times: dict[int, list[Taken]] = {1: [], 2: []}
    for jobs in (1, 2, 2, 1):
        with tempfile.TemporaryDirectory() as folder:
            found = taken(Path(folder) / "sweep", jobs=jobs, num_points=chosen.points, steps=chosen.steps)
        times[jobs].append(found)
        print(
            f"{jobs} process{'es' if jobs > 1 else ''}: {found.clock:.1f} s for {chosen.points} runs of {chosen.steps} "
            f"steps, {found.processor:.1f} s of processors",
            flush=True,
        )
    one, two = (min(times[jobs], key=lambda found: found.clock) for jobs in (1, 2))
    ratio = one.clock / two.clock
    print(f"two processes: {ratio:.2f} times one (bound {BOUND}): {'met' if ratio >= BOUND else 'NOT met'}")
    print(f"processor time of two: {two.processor / one.processor:.2f} times that of one, with a start of Python each")
    return ratio < BOUND


if __name__ == "__main__":
    sys.exit(main())
