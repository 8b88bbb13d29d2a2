"""The tables of docs/monitor.md on alarms, forecasts and remedies are those of the rows that are kept."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

from locater.monitor.alarms import SHARPEN, SHRINK

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("fleet_score", ROOT / "runs" / "fleet_score.py")
assert SPEC is not None and SPEC.loader is not None
SCORE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(SCORE)
PAGE = (ROOT / "docs" / "monitor.md").read_text(encoding="utf-8")
NAMES = {
    "lower rate": "0.2 times the rate, without going back", "QKClip": "`QKClip(threshold=30)`", "QKNorm": "`QKNorm`",
    "LocAteR auto": '`LocAteR`, `"auto"`, decoupled', "LocAteR third": "`LocAteR`, `Auto(share=1 / 3)`, decoupled",
    "RollBack": "`RollBack(0.2)`",
}  # fmt: skip


@pytest.fixture(scope="module")
def printed():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        SCORE.main(folder=SCORE.FOLDER)
    return out.getvalue()


def test_the_page_counts_the_runs_that_are_kept(printed):
    num_runs, num_diverged = map(int, re.match(r"(\d+) runs, (\d+) diverge", printed).groups())
    assert num_runs >= 60 and f"{num_diverged} of {num_runs}" in PAGE


@pytest.mark.parametrize("kind", ["logit explosion", "entropy collapse"])
def test_precision_recall_and_lead_of_alarms(kind, printed):
    precision, recall, lead = re.search(rf"\| {kind} \| (.*?) \| (.*?) \| (-?\d+) steps", printed).groups()
    words = f"{lead} steps" if int(lead) > 0 else f"none: {-int(lead)} steps behind"
    assert f"| {kind} | {precision} | {recall} | {words} |" in PAGE


@pytest.mark.parametrize(("every", "place"), [(10, "a report"), (50, "a checkpoint")])
def test_what_checkpoints_alone_would_tell(every, place, printed):
    limit, precision, recall, lead = re.search(
        rf"\| σ₁\(W\) > (\S+) λ, every {every} steps \| (.*?) \| (.*?) \| (-?\d+) steps", printed
    ).groups()
    words = f"{lead} steps" if int(lead) > 0 else f"none: {-int(lead)} steps behind"
    assert f"| none: σ₁(W) > {limit} λ at {place}, every {every} steps | {precision} | {recall} | {words} |" in PAGE


def test_alarms_that_were_never_raised_are_said_to_be(printed):
    assert "| rank collapse, not finite | never raised |" in PAGE
    assert all(f"| {kind} | 0 of 0 |" in printed for kind in ("rank collapse", "not finite"))


def test_no_forecasts_are_made_while_their_record_is_below_four_in_five(printed):
    found = re.findall(
        r"\| above [\d.]+ of the limit, within \d+ steps \| (\d+) of (\d+) \| (\d+) of (\d+) \|", printed
    )
    assert len(found) == 9 and all(int(c) / int(d) < 0.8 for _, _, c, d in found)
    assert re.search(r"Of 13 forecasts .*? odd seeds 3 came true .*?of 22 in the even seeds\s+none", PAGE, re.DOTALL)
    assert ("0", "22", "3", "13") in found


@pytest.mark.parametrize("remedy", NAMES)
def test_remedies(remedy, printed):
    tried, saved, change = re.search(rf"\| {remedy} \| (\d+) \| (\d+) \| ([+-][\d.]+) \|", printed).groups()
    words = "0.00" if float(change) == 0 else change.replace("-", "−")
    assert f"| {NAMES[remedy]} | {tried} | {saved} | {words} |" in PAGE


def test_the_first_advice_is_what_saved_most(printed):
    saved = {
        name: int(count) for name, count in re.findall(r"^\| (\w[\w ]*) \| \d+ \| (\d+) \| [+-]", printed, re.MULTILINE)
    }
    assert SHRINK[0][0] == SHARPEN[0][0] == max(saved, key=lambda name: saved[name]) == "RollBack"
