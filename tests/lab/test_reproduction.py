"""docs/reproduction.md says what the runs that are kept in runs/measured hold: each table names its command."""

import json
import re
import shlex
from pathlib import Path

import pytest

from command import locater

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reproduction.md"
COLUMNS = {
    "perplexity": ("quantities", "perplexity"),
    "difference": ("differences", "perplexity"),
    "entropy": ("quantities", "entropy"),
    "tr W/λ": ("quantities", "trace_over_temperature"),
    "tr W²/λ²": ("quantities", "trace_of_square_over_temperature_squared"),
    "η/λ": ("quantities", "eta_over_temperature"),
    "ξ": ("quantities", "xi"),
    "localisation": ("quantities", "localisation"),
    "near mass": ("quantities", "near_mass"),
    "residual": ("quantities", "residual"),
    "effective rank": ("quantities", "effective_rank"),
}


def tables() -> list[tuple[str, list[dict[str, str]]]]:
    """Those of the page that hold results, a dictionary for each row, with the last command before each."""
    found = []
    text = PAGE.read_text(encoding="utf-8")
    for block in re.finditer(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [[cell.strip(" `") for cell in line.strip("|\n").split("|")] for line in block[0].splitlines()]
        if "perplexity" in rows[0] or any(heading.startswith("step ") for heading in rows[0]):
            commands = re.findall(r"`(locater runs [^`]+)`", text[: block.start()])
            found.append((commands[-1], [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]))
    return found


def measured(command: str, folder: Path, *further: str) -> dict[str, dict]:
    _, *arguments = shlex.split(command)
    result = locater(*arguments, *further, "--json", folder / "runs.json")
    assert result.code == 0, result.err
    return {arm["arm"]: arm for arm in json.loads((folder / "runs.json").read_text())["arms"]}


def assert_shown(cell: str, estimate: dict) -> None:
    """The mean, rounded to the digits shown, and its error where there is one."""
    mean, *error = cell.replace("−", "-").split(" ± ")
    half = 0.51 * 10.0 ** -len(mean.partition(".")[2])
    assert float(mean) == pytest.approx(estimate["mean"], abs=half)
    assert (estimate["standard_error"] is not None) == bool(error)
    assert not error or float(error[0]) == pytest.approx(estimate["standard_error"], abs=half)


@pytest.mark.parametrize(("command", "rows"), tables(), ids=[command for command, _ in tables()])
def test_the_tables_hold_what_was_measured(command, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    arms = measured(command, tmp_path)
    assert {row["arm"] for row in rows} == set(arms)
    steps = {heading for heading in rows[0] if heading.startswith("step ")}
    at = {heading: measured(command, tmp_path, "--step", re.sub(r"\D", "", heading)) for heading in steps}
    for row in rows:
        for heading in row.keys() & COLUMNS.keys():
            group, quantity = COLUMNS[heading]
            if row[heading] != "–":
                assert_shown(row[heading], arms[row["arm"]][group][quantity])
            else:
                assert heading == "difference" and group not in arms[row["arm"]]
        for heading in steps:
            assert_shown(row[heading], at[heading][row["arm"]]["quantities"]["perplexity"])
        assert "seeds" not in row or int(row["seeds"]) == len(arms[row["arm"]]["seeds"])


def test_there_are_tables():
    assert len(tables()) == 6 and all(rows for _, rows in tables())


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / link).exists(), link
