"""What a newcomer meets: a command at work says so, results go where they were asked for, refusals name the cause."""

import io
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import locater
from locater.cli import results as module
from locater.cli.results import progress
from locater.errors import Refusal
from locater.models import Config
from locater.packages import EXAMPLE, packaged

pytestmark = pytest.mark.quick


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def test_a_long_command_says_where_it_is_without_a_terminal(clock, capsys):
    with progress("predicting x[1]", long=True) as tell:
        assert capsys.readouterr().err == "predicting x[1] …\n"
        tell(1, 9)
        assert capsys.readouterr().err == ""
        clock[0] += module.BETWEEN_LINES
        tell(4, 9)
        tell(5, 9)
        assert capsys.readouterr().err == "predicting x[1]: step 4 of 9\n"


def test_a_quick_command_says_nothing(clock, capsys):
    with progress("scanning") as tell:
        tell(1, 2)
        tell(2, 2)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with progress("scanning [red]x", long=True) as tell:
        tell(1, 2)
    assert "scanning [red]x" in stream.getvalue() and "…" not in stream.getvalue()


def test_the_plane_is_told_row_by_row():
    from locater.theory.phase_diagram import DEVIATIONS, phase_diagram

    told = []
    phase_diagram(
        length=4, d_model=4, num_walks=2, generator=torch.Generator(), progress=lambda *step: told.append(step)
    )
    assert told == [(row + 1, len(DEVIATIONS)) for row in range(len(DEVIATIONS))]


@pytest.mark.parametrize("arguments", [("scan", "--json"), ("scan", "--table"), ("report", "-o"), ("theory", "--json")])
def test_a_folder_that_is_made_for_a_result_is_named(tmp_path, arguments):
    command, option = arguments
    path = tmp_path / "new" / "folder" / "result"
    said = locater(command, option, path, columns=300).err
    assert f"made the folder {path.parent}\n" in said and path.is_file()
    assert "made the" not in locater(command, option, path, columns=300).err


def test_what_goes_to_standard_output_makes_no_folder():
    done = locater("scan", "--json", "-")
    assert "made the" not in done.err and json.loads(done.out)["heads"]


@pytest.mark.parametrize("command", [("sweep", "--grid", "strength=0"), ("study", "softmax")])
def test_an_engine_that_is_missing_leaves_no_folder(tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = locater(*command, "--out", tmp_path / "new", "--on", "ray")
    assert refused.code == 1 and 'pip install "locater[ray]"' in refused.err
    assert not (tmp_path / "new").exists()


def test_weights_without_a_config_are_called_that(tmp_path):
    with pytest.raises(Refusal, match="missing a config.json with `n_layer` or `layers`; put"):
        Config({})["n_layer|layers"]
    save_file({"transformer.h.0.attn.c_attn.weight": torch.ones(8, 24)}, tmp_path / "model.safetensors")
    refused = locater("scan", tmp_path / "model.safetensors")
    assert refused.code == 1 and "put the model's config.json next to its weights" in refused.err


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_nan_in_a_norm_is_called_nan(tmp_path, part):
    from shutil import copytree

    copytree(packaged(EXAMPLE), tmp_path / "model")
    path = next((tmp_path / "model").glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if "attention_norm" in name and name.endswith(part))
    tensors[name][0] = float("nan")
    save_file(tensors, path)
    refused = locater("scan", tmp_path / "model", columns=300)
    what = {"weight": "gain", "bias": "bias"}[part]
    assert refused.code == 1 and f"expected a finite {what} of the input norm, got NaN or infinity" in refused.err
    assert "overflow" not in refused.err + refused.out
