"""docs/reproduction.md says what the runs that are kept in runs/measured hold."""

import re
from pathlib import Path

import pytest

from locater.studies.runs import compare_runs

DOCS = Path(__file__).parents[1] / "docs"
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


def tables() -> list[list[dict[str, str]]]:
    """Those of the page that compare perplexities, a dictionary for each row."""
    found = []
    for block in re.findall(
        r"(?:^\|.*\n)+", (DOCS / "reproduction.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    ):
        rows = [[cell.strip(" `") for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        if {"perplexity", "seeds"} <= set(rows[0]):
            found.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
    return found


def test_the_table_holds_what_was_measured():
    document = compare_runs(DOCS.parent / "runs" / "measured", step=1020, against="none")
    arms = {arm["arm"]: arm for arm in document["arms"]}
    (rows,) = tables()
    assert {row["arm"] for row in rows} == set(arms)
    for row in rows:
        arm = arms[row["arm"]]
        assert int(row["seeds"]) == len(arm["seeds"])
        for heading, (group, quantity) in COLUMNS.items():
            if row[heading] == "–":
                assert row["arm"] == "none" and heading == "difference"
                continue
            mean, *error = row[heading].split(" ± ")
            measured, half = arm[group][quantity], 0.51 * 10.0 ** -len(mean.partition(".")[2])
            assert float(mean) == pytest.approx(measured["mean"], abs=half), (row["arm"], heading)
            assert (measured["standard_error"] is not None) == bool(error)
            assert not error or float(error[0]) == pytest.approx(measured["standard_error"], abs=half)


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", (DOCS / "reproduction.md").read_text(encoding="utf-8")):
        assert (DOCS / link).exists(), link
