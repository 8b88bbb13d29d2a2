"""Engines of a sweep: this process, several of this machine, or the tasks of a SLURM array."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from locater.records import write

from .folder import Measure, Sweep

POLL_SECONDS = 0.2
SLURM = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --requeue
#SBATCH --signal=TERM@120
# Task i measures point i, or goes on with it: SIGTERM saves, and a requeued task resumes.
export OMP_NUM_THREADS="${{SLURM_CPUS_PER_TASK:-1}}"
exec >>{folder}/slurm-"$SLURM_ARRAY_TASK_ID".log 2>&1
exec {command} sweep --resume {folder} --task "$SLURM_ARRAY_TASK_ID"
"""


def local(sweep: Sweep, measure: Measure, *, jobs: int, tell: Callable[[int, int], None] = lambda *_: None) -> None:
    """One process: here. Several: workers with one thread each; one that dies is replaced until nothing is missing."""
    total = len(sweep.points)
    if jobs == 1:
        for number in sweep.missing():
            sweep.work(measure, only=[number])
            tell(total - len(sweep.missing()), total)
        return
    workers: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-m", "locater.cli", "sweep", "--resume", str(sweep.folder), "--worker"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        while missing := sweep.missing():
            workers = [one for one in workers if one.poll() is None]
            workers += [
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
                for _ in range(min(jobs, len(missing)) - len(workers))
            ]
            tell(total - len(missing), total)
            time.sleep(POLL_SECONDS)
        tell(total, total)
    finally:
        for one in workers:  # asked to save, and waited for: none outlives the one who started it
            if one.poll() is None:
                one.send_signal(signal.SIGTERM)
        for one in workers:
            one.wait()


def slurm_script(sweep: Sweep, path: Path) -> None:
    """An array job with a task for every point."""
    folder, command = shlex.quote(str(sweep.folder.resolve())), shlex.join([sys.executable, "-m", "locater.cli"])
    # Lines for sbatch cannot be quoted for a shell: they hold nothing but letters that both take as they are.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", sweep.folder.resolve().name)
    text = SLURM.format(name=name, last=len(sweep.points) - 1, folder=folder, command=command)
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
