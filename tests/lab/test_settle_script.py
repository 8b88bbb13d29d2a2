"""`runs/settle.py` rehearsed on a tiny text; that a killed run ends equal to the bit is in test_training_killed.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from training_cases import write_text

sys.path.insert(0, str(Path(__file__).parents[2] / "runs"))
import settle  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "runs" / "settle.py"


def test_the_grid_is_widened_at_its_edge():
    tried: list[float] = []

    def loss(value: float) -> float:
        tried.append(value)
        return abs(value - 12)

    assert settle.lowest(loss, (1.0, 2.0, 4.0)) == 8.0 and tried == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert settle.lowest(lambda value: abs(value - 2), (1.0, 2.0, 4.0)) == 2.0


def test_arms_differ_in_what_they_say():
    assert settle.arm_options("none", 0.0, 100) == {}
    assert settle.arm_options("held", 1e-2, 100) == {"strength": 1e-2}
    assert settle.arm_options("released", 1e-2, 100) == {"strength": 1e-2, "strength_until": 25}
    assert settle.arm_options("decay", 2.0, 100) == {"qk_decay": 2.0}


@pytest.mark.slow
def test_a_rehearsal_ends_and_a_second_one_has_nothing_to_do(tmp_path):
    """Every stage, and a run that was begun with other options is refused."""
    text, out = write_text(tmp_path), tmp_path / "out"
    environment = os.environ | {"LOCATER_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def rehearse() -> subprocess.CompletedProcess:
        command = [sys.executable, SCRIPT, text, out, "--quick"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)

    first = rehearse()
    assert first.returncode == 0, first.stderr
    assert len(list((out / "rows" / "A").iterdir())) == 20 and len(list((out / "rows" / "B").iterdir())) == 6
    again = rehearse()
    assert again.returncode == 0 and again.stdout == first.stdout
    (out / "rows" / "A" / "none-seed0" / "metrics.jsonl").unlink()
    config = out / "runs" / "A" / "none-seed0.config.json"
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 7'))
    other = rehearse()
    assert other.returncode == 1 and "begun with other options" in other.stderr
