"""`runs/paper.sh` on a tiny text: arms, seeds, a length that grows, what is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from locater_lab.train.metrics import read_metrics
from locater_lab.train.run import read_run_config
from training_cases import TINY, write_text

SCRIPT = Path(__file__).parents[2] / "runs" / "paper.sh"


def paper(text: Path, out: Path, **settings: str) -> subprocess.CompletedProcess:
    tiny = {name: value for name, value in TINY.items() if name not in ("steps", "validate_every", "save_every")}
    flags = " ".join(f"--set {name}={value}" for name, value in tiny.items())
    own = {"FLAGS": flags, "EVERY": "2", "LOCATER": str(Path(sys.executable).with_name("locater"))}
    environment = os.environ | own | {"LOCATER_CACHE": str(out.parent / "cache"), "COLUMNS": "80"} | settings
    return subprocess.run(["bash", SCRIPT, text, out], env=environment, capture_output=True, text=True, timeout=300)


def test_the_papers_runs_compare_arms_and_can_be_lengthened(tmp_path):
    text, out = write_text(tmp_path), tmp_path / "runs"
    unknown = paper(text, out, ARMS="none nonsense")
    assert unknown.returncode != 0 and "no arm called nonsense" in unknown.stderr
    assert not list(out.glob("*-seed*"))

    kept = out / "none-seed0" / "metrics.jsonl"  # as in runs/measured: numbers without the run that they are of
    kept.parent.mkdir(parents=True)
    kept.write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    taken = paper(text, out, ARMS="none", SEEDS="0", LENGTH="--steps 2")
    assert taken.returncode != 0 and "which holds metrics.jsonl" in taken.stderr and kept.read_text().endswith("2.0}\n")
    shutil.rmtree(kept.parent)

    first = paper(text, out, ARMS="none let-go-3.5", SEEDS="1", LENGTH="--steps 2")
    assert first.returncode == 0, first.stderr
    assert "let-go-3.5 seed 1: validation perplexity" in first.stdout
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"none-seed1", "let-go-3.5-seed1"}
    held = read_run_config(out / "let-go-3.5-seed1")
    assert (held.stabiliser.strength, held.stabiliser.mean, held.stabiliser.mean_until) == (2.5e-3, "3.5", 500)
    assert held.loop.seed == 1 and not read_run_config(out / "none-seed1").stabiliser.is_locater

    longer = paper(text, out, ARMS="none", SEEDS="1", LENGTH="--steps 4")
    assert longer.returncode == 0, longer.stderr
    rows = [row for row in read_metrics(out / "none-seed1" / "metrics.jsonl") if row["kind"] == "validation"]
    assert [row["step"] for row in rows] == [2, 4]
    other = paper(text, out, ARMS="none", SEEDS="1", LENGTH="--steps 6", EVERY="3")
    assert other.returncode != 0 and "none-seed1 was begun with other settings" in other.stderr
    assert "give these an OUT of their own" in other.stderr and read_metrics(out / "none-seed1" / "metrics.jsonl")
    finished = paper(text, out, ARMS="none", SEEDS="1", LENGTH="--steps 4")
    assert "none seed 1" in longer.stdout and "none seed 1" not in finished.stdout  # nothing left to do
    assert all("none" in done.stdout and "let-go-3.5" in done.stdout for done in (first, finished))  # the table
