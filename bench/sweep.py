"""Two processes against one on the same sweep: `python bench/sweep.py`; the bound is 1.8 times the points per second.

Both orders are run, and the better time of each counts: another's work on the machine can only slow one down. What is
timed is the sweep's own work, from the first row's run to the last row, so that starting Python counts for neither.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from locater.studies.sweep.folder import create

BOUND = 1.8
OPTIONS = dict(data="embedded", tokenizer="bpe", bpe_size=512, context=32, d_model=32, d_feedforward=64)
OPTIONS |= dict(batch=8, warmup=10, validate_every=10_000, validation_windows=64, save_every=10_000)


def seconds(folder: Path, *, jobs: int, num_points: int, steps: int) -> float:
    """From the moment at which all workers are at work to the last row."""
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
    workers = [subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) for _ in range(jobs)]
    while len(list((folder / "runs").glob("*/metrics.jsonl"))) < jobs:
        time.sleep(0.01)
    start = time.perf_counter()
    for worker in workers:
        assert worker.wait() == 0
    assert not sweep.missing()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--steps", type=int, default=400)
    chosen = parser.parse_args()
    times: dict[int, list[float]] = {1: [], 2: []}
    for jobs in (1, 2, 2, 1):
        with tempfile.TemporaryDirectory() as folder:
            taken = seconds(Path(folder) / "sweep", jobs=jobs, num_points=chosen.points, steps=chosen.steps)
        times[jobs].append(taken)
        print(
            f"{jobs} process{'es' if jobs > 1 else ''}: {taken:.1f} s for {chosen.points} runs of {chosen.steps} steps",
            flush=True,
        )
    ratio = min(times[1]) / min(times[2])
    print(f"two processes: {ratio:.2f} times one (bound {BOUND}): {'met' if ratio >= BOUND else 'NOT met'}")
    return ratio < BOUND


if __name__ == "__main__":
    sys.exit(main())
