"""Scripts of tests/distributed on several processes, by torchrun; a marker makes `-m torchrun` repeat them all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "distributed"
PATIENCE = 900  # seconds; far above what a launch takes, since neighbours may hold all cores

uses_torchrun = pytest.mark.torchrun


def torchrun(script: str, *arguments: object, num_processes: int, **environment: str) -> str:
    """What the processes printed, when all have ended well; a port that is free is chosen by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    done = subprocess.run(
        [*command, str(SCRIPTS / script), *map(str, arguments)],
        env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return done.stdout
