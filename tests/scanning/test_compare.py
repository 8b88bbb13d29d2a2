"""`locater compare`: which heads moved, between two checkpoints and along a run."""

import csv
import json

import pytest
import torch

from command import locater
from family_cases import CASES
from locater.errors import Refusal
from locater.scanning import compare as library


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three checkpoints, in which only head 1 of layer 1 moves, a little more each time."""
    folder = tmp_path_factory.mktemp("run")
    model = next(case for case in CASES if case.name == "llama").build()
    for step in (100, 20, 3):  # written in another order than that of the steps
        with torch.no_grad():
            saved = model.model.layers[1].self_attn.q_proj.weight.clone()
            model.model.layers[1].self_attn.q_proj.weight[12:24].mul_(1 + step / 50)
        model.save_pretrained(folder / f"checkpoint-{step}")
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.copy_(saved)
    return folder


def test_the_head_that_moved_is_found(run):
    first, last = run / "checkpoint-3", run / "checkpoint-100"
    result = locater("compare", first, last, "--json", "-")
    assert result.code == 0
    document = json.loads(result.out)
    assert document["schema"] == "locater.compare/1"
    moved = {(row["layer"], row["head"]): row["moved"] for row in document["heads"]}
    assert moved.pop((1, 1)) > 0.5
    assert max(moved.values()) == 0
    assert "8 heads, 7 unmoved" in result.err and max(map(len, result.err.splitlines())) <= 80


def test_a_run_is_followed_by_step(run):
    found = library.compare([run], length=32)
    assert [one.source.rsplit("-")[-1] for one in found.scans] == ["3", "20", "100"]
    (movement,) = found.most_moved(1)
    etas = [row.eta for row in movement.rows]
    assert etas == sorted(etas) and movement.path == pytest.approx(movement.moved, rel=1e-4)


def test_processes_give_the_same(run):
    one = library.compare([run], length=32)
    two = library.compare([run], jobs=2, length=32)
    assert two.to_json()["sources"] == one.to_json()["sources"]
    for ours, theirs in zip(one.heads, two.heads, strict=True):  # other threads, other order of sums
        assert [row.eta for row in ours.rows] == pytest.approx([row.eta for row in theirs.rows], rel=1e-5)
        assert [row.regime for row in ours.rows] == [row.regime for row in theirs.rows]


def test_refusals(run, tmp_path):
    next(case for case in CASES if case.name == "gpt2").build().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(Refusal, match="at least two"):
        library.compare([run / "checkpoint-3"])
    model = next(case for case in CASES if case.name == "llama-head-dim").build()
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(Refusal, match="one shape"):
        library.compare([run / "checkpoint-3", tmp_path / "other"])
    assert locater("compare", run, "--jobs", 0).code == 2


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".gguf"])
def test_every_kind_of_file_that_scan_reads_is_a_checkpoint_of_a_run(tmp_path, suffix):
    for name in ("step-2", "step-10", "model-00001-of-00002", "rng_state_3"):
        (tmp_path / f"{name}{suffix}").touch()
    assert [name.rpartition("/")[2] for name in library.checkpoints_in(tmp_path)] == [
        f"step-2{suffix}",
        f"step-10{suffix}",
    ]


def test_a_table_and_names_that_differ(run, tmp_path):
    first, last = run / "checkpoint-3", run / "checkpoint-100"
    result = locater("compare", first, last, "--table", tmp_path / "moved.csv")
    assert result.code == 0 and result.out.startswith("checkpoint-3 → checkpoint-100\n")
    frame = library.compare([first, last]).to_frame()
    with (tmp_path / "moved.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(frame) == len(rows) == 8 and list(frame.columns) == list(rows[0])
    assert float(rows[5]["xi_2"]) == frame["xi_2"][5] and frame["moved"].idxmax() == 5
    assert library.shortest_names(["x/a/model", "x/b/model"]) == ["a/model", "b/model"]
    assert library.shortest_names(["a", "a"]) == ["a", "a"] and library.shortest_names(["/"]) == ["/"]
