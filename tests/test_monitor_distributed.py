import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "distributed" / "monitored.py"


def test_two_processes_report_what_one_does():
    """Data parallel, FSDP2 and tensor parallel; one collective call per report."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("e-0") + done.stdout.count("0.00e+00") == 5, done.stdout
