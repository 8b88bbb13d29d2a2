"""Every command and every line of Python that the pages show is run, in a folder that has what they name."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

from command import locater
from locater.cli.program import app
from locater_lab.train import run
from training_cases import tiny

ROOT = Path(__file__).parents[2]
# Pages whose every block runs as it stands; the others are run by the tests of what they are about.
RUN = ["README.md", *(f"docs/{name}.md" for name in ("index", "theory", "own_stabiliser", "stabilisers"))]
RUN += [f"docs/tutorials/{name}.md" for name in ("student", "practitioner", "researcher")]
PYTHON = [
    *RUN,
    "docs/families.md",
    "docs/prediction.md",
    "docs/reproduction.md",
]  # whose commands take long, but not their Python
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What a reader is supposed to have: what `make demo` made, checkpoints, matrices."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("readme")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    model.save_pretrained(folder / "gpt2")
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight.mul_(1.5)
    model.save_pretrained(folder / "gpt2-tuned")
    deeper = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=3, n_head=2, n_positions=32))
    deeper.save_pretrained(folder / "after")  # as the researcher's page does before its command
    for name in "QK":
        np.save(folder / f"{name}.npy", np.random.default_rng(ord(name)).normal(size=(8, 16)) / 4)
    (folder / "notes.txt").write_text(
        "".join(f"{n} and {n * 37 % 101} make {n + n * 37 % 101} .\n" for n in range(2000))
    )
    for name in ("without", "with"):  # of texts that are long enough to predict
        config = tiny(folder / "notes.txt", steps=4, context=64)
        run.start(config, folder / "demo" / name, say=lambda sentence: None)
    shutil.copytree(folder / "demo" / "with" / "model", folder / "path" / "to" / "model")
    shutil.copytree(folder / "demo" / "with", folder / "runs" / "paper" / "decay-8-seed2")
    shutil.copy(folder / "notes.txt", folder / "my.txt")
    return folder


def split(block: str) -> list[tuple[str, str]]:
    """Each command with the output shown below it."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], part.partition("\n")[2].rstrip()) for part in parts]


# Prediction runs a model for minutes, and the demo trains two.
SLOW = ("locater predict", "locater demo")
WHERE = {  # the page that shows it first: a command that several show runs once
    (command.partition(" #")[0].rstrip(), output): page
    for page in reversed(RUN)
    for block in blocks(page, "console")
    for command, output in split(block)
}
SHOWN = [
    pytest.param(*pair, id=f"{page}: {pair[0]}", marks=[pytest.mark.slow] if pair[0].startswith(SLOW) else [])
    for pair, page in WHERE.items()
]


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_shown_commands_run(command, output, folder, monkeypatch):
    monkeypatch.chdir(folder)
    program, *arguments = shlex.split(command, comments=True)
    if program in ("git", "cd", "pip", "source"):
        return
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(arguments[: arguments.index("&&")] if "&&" in arguments else arguments) <= set(targets)
        return
    assert program == "locater"
    result = locater(*arguments)
    assert result.code == 0, result.err
    printed = [line.rstrip() for line in result.out.splitlines()]
    shown = [line.rstrip() for line in output.removesuffix("\n…").splitlines()]
    assert shown == printed[: len(shown)]


# How far a shown number may be off: a run that is unstable on purpose is another one on every processor.
LOOSE = {"docs/tutorials/practitioner.md": dict(rel=0.6, abs=1.0)}
# Alarms that such a run may or may not come to; its page says so.
FURTHER = {"docs/tutorials/practitioner.md": "entropy collapse:"}
NUMBER = r"-?\d+(?:\.\d+)?"


def without(alarm: str | None, printed: str) -> str:
    """Leave out the lines of an alarm, with those that it is wrapped over."""
    kept, skipping = [], False
    for line in printed.splitlines():
        skipping = alarm is not None and (line.startswith(alarm) or skipping and line.startswith("  "))
        kept += [] if skipping else [line]
    return "\n".join(kept)


@pytest.mark.parametrize("page", PYTHON)
def test_shown_python_runs_and_prints_what_is_shown(page, folder, monkeypatch, capsys):
    """One after the other, as a reader would type them; words as they stand, numbers about."""
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    text = (ROOT / page).read_text(encoding="utf-8")
    for snippet, shown in re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", text, flags=re.DOTALL):
        capsys.readouterr()
        exec(compile(snippet, page, "exec"), names)
        if shown:
            printed = without(FURTHER.get(page), capsys.readouterr().out)
            wanted, got = (re.sub(rf"{NUMBER}|\s+", " ", one).split() for one in (shown, printed))
            assert got == wanted, printed
            wanted, got = ([float(number) for number in re.findall(NUMBER, one)] for one in (shown, printed))
            assert got == pytest.approx(wanted, **LOOSE.get(page, dict(rel=0.02, abs=0.02))), printed


# Names that a page's Python takes from its reader's own loop.
LOOPS = {
    "docs/monitor.md": """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 50, (2, 16))
batches = [{"input_ids": tokens, "labels": tokens}] * 2
""",
}


@pytest.mark.parametrize("page", LOOPS)
def test_python_for_a_readers_loop_runs(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    for snippet in (LOOPS[page], *blocks(page, "python")):
        exec(compile(snippet, page, "exec"), names)


# Pages whose Python another test runs, with what it needs.
ELSEWHERE = {"docs/how-to.md": "tests/models/test_slices.py"}
# What is shown and not run: words, references, and a layout, which tests/models/test_layout.py reads.
SHOWN_ONLY = ("text", "bibtex", "yaml")


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_tested(page):
    fences = re.findall(r"^```(.*)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    kinds = set(fences[::2])
    assert kinds <= {"console", "python", *SHOWN_ONLY}, f"{page} has blocks that no test looks at"
    if "python" in kinds:
        assert page in (*PYTHON, *LOOPS, *ELSEWHERE), f"the Python of {page} is run by no test"


LONG = [
    (page, command)
    for page in PAGES
    if page not in RUN
    for language in ("console", "bash", "sh")
    for block in blocks(page, language)
    for command, _ in split(block.replace("\\\n", ""))
    if "locater " in command
]


@pytest.mark.parametrize(("page", "command"), LONG)
def test_commands_that_take_long_have_the_arguments_that_there_are(page, command):
    """Trainings, sweeps and hub models: parsed as the program does, not carried out."""
    words = shlex.split(re.split(r"&&|[|>] ", command)[0], comments=True)
    verb, *arguments = words[words.index("locater") + 1 :]
    typer.main.get_command(app).commands[verb].make_context(verb, arguments)


@pytest.mark.parametrize("page", PAGES)
def test_commands_within_sentences_name_what_there_is(page):
    """Verbs and options; what a reader has to put in stands there in capitals or is left out."""
    verbs = typer.main.get_command(app).commands
    for span in re.findall(r"`locater ([a-z][^`]*)`", (ROOT / page).read_text(encoding="utf-8")):
        verb, *words = shlex.split(span)
        known = {name for option in verbs[verb].params for name in (*option.opts, *option.secondary_opts)}
        asked = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert asked <= known | {"--help"}, span


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        target, _, anchor = link.partition("#")
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), link
            assert not anchor or anchor in anchors((ROOT / page).parent / target if target else ROOT / page), link


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_on_the_map_of_the_site():
    map_of_the_site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert page.removeprefix("docs/") in map_of_the_site, page


def test_the_readers_first_minute():
    """What to type first, and Python with its output, stand near the top."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert "make demo" in "\n".join(lines[:20]) and "import locater" in "\n".join(lines[:40])
