"""Two processes equal one with the same batch, by DDP and by FSDP2; what two saved, one and four continue."""

import shutil
import sys
from pathlib import Path

import pytest

from launch import SCRIPTS, torchrun, uses_torchrun
from locater_lab.train import run
from locater_lab.train.metrics import read_metrics
from training_cases import tiny, weights, write_text

sys.path.insert(0, str(SCRIPTS))
from training import CHANGED, KINDS, STOP, quiet  # noqa: E402

pytestmark = uses_torchrun


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process to the middle and to the end; two processes to the middle; copies resumed by four and by one."""
    folder = tmp_path_factory.mktemp("runs")
    text, cache = write_text(folder), folder / "cache"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCATER_CACHE", str(cache))
        run.start(tiny(text, **CHANGED), folder / "half", stop_after=STOP, say=quiet)
        shutil.copytree(folder / "half", folder / "whole")
        run.resume(folder / "whole", say=quiet)
        torchrun("training.py", "first", folder / "two", text, num_processes=2, LOCATER_CACHE=str(cache))
        for name in ("one", "four"):
            shutil.copytree(folder / "two", folder / name)
        torchrun("training.py", "then", folder / "four", text, num_processes=4, LOCATER_CACHE=str(cache))
        for kind in KINDS:
            run.resume(folder / "one" / kind, say=quiet)
    return folder


def assert_close(found: Path, expected: Path) -> None:
    """To 1e-5, but for the bias of keys: softmax does not see it, so its gradient is rounding, which Adam blows up."""
    ours, theirs = weights(found), weights(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if not name.endswith("key.bias"):
            assert (ours[name] - tensor).abs().max() < 1e-5, name
    rows = [read_metrics(path / "metrics.jsonl") for path in (found, expected)]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    for ours, theirs in zip(*rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5), (ours["kind"], ours["step"])
        for head, other in zip(ours.get("heads", []), theirs.get("heads", []), strict=True):
            assert head["normalised_entropy"] == pytest.approx(other["normalised_entropy"], abs=1e-5)
            assert head["trace"] == pytest.approx(other["trace"], abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(runs, kind):
    assert_close(runs / "two" / kind, runs / "half")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", ["one", "four"])
def test_what_two_saved_others_continue(runs, kind, count):
    assert_close(runs / count / kind, runs / "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_a_diverged_run_says_where_once(runs, kind):
    first, second = ((runs / "two" / f"{kind}-diverged-{rank}.txt").read_text() for rank in (0, 1))
    assert "the logits of layer 0, head" in first and "exploded" in first
    assert "the first process says where" in second


def test_metrics_are_written_once(runs):
    steps = [row["step"] for row in read_metrics(runs / "four" / "ddp" / "metrics.jsonl") if row["kind"] == "train"]
    assert steps == [3, 6, 9, 12, 15, 18, 20]
