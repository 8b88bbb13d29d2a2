"""The tables of docs/monitor.md on alarms, forecasts and remedies are those of the rows that are kept."""

import contextlib
import importlib.util
import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locater import Live, scan
from locater.monitor import AttentionMonitor
from locater.monitor.alarms import CONDITIONS, SHARPEN, SHRINK, SPREAD

ROOT = Path(__file__).parents[2]


def program(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "runs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCORE, RUNS = program("fleet_score"), program("fleet")
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


@pytest.mark.parametrize("kind", ["any of the first four", *(condition.kind for condition in CONDITIONS)])
def test_precision_recall_and_lead_of_every_alarm(kind, printed):
    named = kind if kind in PAGE else "**any of the next four**"
    pattern = rf"\| {re.escape(kind)} \| (.*?) \| (.*?) \| (?:(-?\d+) steps|–) \|"
    precision, recall, lead = re.search(pattern, printed).groups()
    words = "" if lead is None else f"{lead} steps" if int(lead) > 0 else f"none: {-int(lead)} steps behind"
    precision = "never raised" if lead is None else precision
    assert f"| {named} | {precision} | {recall} | {words} |".replace("|  |", "| |") in PAGE


@pytest.mark.parametrize("kind", ["rate", "bf16"])
def test_a_row_has_what_a_scan_of_the_checkpoint_would_say(kind, monkeypatch):
    """So no rows of checkpoints are kept: σ₁ and η of every head, after the step that the report is about."""
    sample, found = torch.randint(RUNS.VOCABULARY, (2, 24)), []

    def step(self, number=None, plain=AttentionMonitor.step):
        report = plain(self, number)
        for layer in report.training if report else ():
            heads = [head for head in scan(Live(self.seen.model, sample=sample)).heads if head.layer == layer.layer]
            found.extend(zip(layer.weights["sigma_1"], [head.sigma for head in heads], strict=True))
            found.extend(zip(layer.weights["eta"], [head.eta for head in heads], strict=True))
        return report

    monkeypatch.setattr(RUNS.AttentionMonitor, "step", step)
    monkeypatch.setitem(RUNS.KINDS, kind, replace(RUNS.KINDS[kind], steps=21))
    RUNS.run(kind, True, 1, "")
    assert len(found) == 3 * 2 * 2 * 2
    assert [one for one, _ in found] == pytest.approx([other for _, other in found], rel=1e-6)


@pytest.mark.parametrize(("every", "place"), [(10, "a report"), (50, "a checkpoint")])
def test_what_checkpoints_alone_would_tell(every, place, printed):
    limit, precision, recall, lead = re.search(
        rf"\| σ₁\(W\) > (\S+) λ, every {every} steps \| (.*?) \| (.*?) \| (-?\d+) steps", printed
    ).groups()
    words = f"{lead} steps" if int(lead) > 0 else f"none: {-int(lead)} steps behind"
    assert f"| none: σ₁(W) > {limit} λ at {place}, every {every} steps | {precision} | {recall} | {words} |" in PAGE


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
    assert SHRINK[0][0] == SHARPEN[0][0] == SPREAD[0][0] == max(saved, key=lambda name: saved[name]) == "RollBack"
