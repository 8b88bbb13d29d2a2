"""How commands look: in narrow terminals, in old encodings, and what they say of themselves."""

import importlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

import locater as locater_package
from command import locater
from locater.cli.output import PLAIN, print_bullet, table
from locater.cli.program import PANELS

SOURCE = Path(locater_package.__file__).parent

HEADINGS = ["layer", "tr W", "ξ range", "late", "meaning"]
ROWS = [["decoder 5", "0.29", "-0.5 … 4.9", "2", "looks at nothing in particular, as far as anybody knows"]]


def printed(width: int, **options) -> str:
    console = Console(width=width, file=None, record=True, quiet=False)
    with console.capture() as capture:
        console.print(table(HEADINGS, ROWS, words=["layer", "meaning"], **options))
    return capture.get()


@pytest.mark.parametrize("width", range(20, 100))
def test_no_number_is_cut_at_any_width(width):
    text = printed(width)
    shown = [heading for heading in HEADINGS[:4] if heading in text.splitlines()[0]]
    cells = dict(zip(HEADINGS, ROWS[0], strict=True))
    for heading in shown:
        assert cells[heading] in text
    lost = set(HEADINGS[:4]) - set(shown)
    told = " ".join(text.split()).partition("in a wider terminal and in --json:")[2]
    assert all(heading in told for heading in lost)
    assert max(map(len, text.splitlines())) <= width


def test_spare_columns_go_first():
    text = printed(45, spare=["tr W"])
    assert "ξ range" in text.splitlines()[0] and "tr W" not in text.splitlines()[0]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_terminals_that_lack_greek_letters_are_spoken_to_plainly(encoding):
    command = [sys.executable, "-m", "locater.cli", "theory", "--moments", "1,1,1"]
    command += ["--temperature", "1", "--length", "4"]
    environment = os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert "xi = 1" in done.stdout.decode(encoding) and "?" not in done.stdout.decode(encoding)
    assert not done.stderr


def test_every_letter_that_commands_print_has_a_plain_one():
    places = [*(SOURCE / "cli").rglob("*.py"), *(SOURCE / "studies").rglob("*.py"), SOURCE / "report" / "terminal.py"]
    letters = {letter for path in places for letter in path.read_text(encoding="utf-8") if not letter.isascii()}
    assert letters <= PLAIN.keys()


def test_lines_of_a_folded_sentence_stay_behind_its_mark():
    written = io.StringIO()
    print_bullet(Console(file=written, width=20), "[red]![/red]", "a [bold]sentence[/bold] that is folded")
    assert written.getvalue() == "! a sentence that is\n  folded\n"


def test_columns_are_counted_in_the_letters_that_are_written():
    """λ becomes six letters where the encoding lacks it: every line is as long as the others, and none too long."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="locater.plain")
    shown = table(["head", "η/λ", "tr W²/λ²"], [["0.1", "1 → 2", "3 ± 1"], ["0.2", "4", "5"]], words=["head"])
    for width, lines in ((40, 3), (20, 4)):
        stream.seek(0), stream.truncate()
        Console(file=stream, width=width).print(shown)
        stream.seek(0)
        found = stream.read().splitlines()
        assert "eta/lambda" in found[0] and ("tr W^2/lambda^2" in found[0]) == (width == 40)
        assert len({len(line) for line in found[:3]}) == 1 and len(found[0]) <= width and len(found) >= lines


def test_the_version_is_the_packages():
    import locater as package

    assert locater("--version").out == f"locater {package.__version__}\n"


def test_the_doctor_tells_what_is_there_and_what_is_not(monkeypatch, tmp_path):
    doctor = importlib.import_module("locater.cli.doctor")
    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "matplotlib" else real(name))
    result = locater("doctor", "--json", tmp_path / "doctor.json")
    document = json.loads((tmp_path / "doctor.json").read_text())
    assert document["core"]["torch"] == real("torch")
    assert document["extras"]["plot"] == {"matplotlib": None}
    assert "without matplotlib" in result.out and "plot" in result.out.split("pip install")[1]
    assert set(document["extras"]) == set(doctor.EXTRAS)


def test_the_doctor_knows_every_extra():
    """Only the collections of extras are left out; read from the project file, since an installation may be older."""
    from locater.cli.doctor import EXTRAS

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) - {"all", "dev", "docs"} == set(EXTRAS)


@pytest.mark.parametrize("verb", [(), ("theory",)])
def test_help_cuts_no_name_at_60_columns(verb):
    result = locater(*verb, "--help", columns=60)
    assert result.code == 0 and not [line for line in result.out.splitlines() if "--" in line and "…" in line]
    assert verb or "--install-completion" in result.out


@pytest.mark.parametrize("verb", [verb for verbs in PANELS.values() for verb in verbs])
def test_help_shows_no_flag_as_if_it_took_a_value(verb):
    shown = locater(verb, "--help").out
    assert "<bool>" not in shown and "--help" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_completion_can_be_shown(monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = locater("--show-completion", "bash")
    assert result.code == 0 and "COMPREPLY" in result.out


def test_the_trainers_help_can_be_read_at_80_columns():
    result = locater("train", "--help")
    assert result.code == 0 and max(map(len, result.out.splitlines())) <= 80
    options = set(re.findall(r"--[a-z-]+", "\n".join(line[:20] for line in result.out.splitlines()))) - {"--help"}
    named = "preset config set out resume stop-after print-config json data steps seed strength"
    assert options == {f"--{name}" for name in named.split()}
