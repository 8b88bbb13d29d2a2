"""The claim at the end of training: what made-up rows say of it, and that the page says what the kept rows do."""

import json
import math
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from locater_lab.data.batches import WindowBatches
from locater_lab.data.sources import Data, TokenData
from locater_lab.data.vocabulary import Words
from locater_lab.fields import DataOptions
from locater_lab.studies.floors import count_floors

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "runs"))
import settled  # noqa: E402
import settled_floors  # noqa: E402
import settled_said  # noqa: E402

STEPS = range(1000, 10_001, 1000)


def said_limit(arms: settled.Arms) -> str:
    """On one line."""
    return " ".join(settled_said.limit(settled.outcome(arms)).split())


def said_advice(kept: Path = settled.KEPT) -> str:
    return settled_said.advice(settled.outcome(settled.read("A", kept)))


def write(
    kept: Path, arm: str, seed: int, *, end: float, early: float = 0.0, last: int = 10_000, trace=1.0, stage="A"
) -> None:
    """A run whose loss falls from 5 to 3.6; `early` is its lead at first, `end` what is added at the end."""
    noise = random.Random(f"{seed}").gauss(0, 0.02)  # of the seed, which the arms share
    own = 0.002 * (seed % 2 - 0.4 - 0.1 * (seed == 4)) * (arm == "held")  # of mean 0 over five
    rows = [{"kind": "train", "step": 50, "loss": 7.0, "learning_rate": 3e-3}]
    for step in (step for step in STEPS if step <= last):
        share = (step - 1000) / 9000
        loss = 3.6 + 1.4 * (1 - share) ** 2 + noise + own + end * share - early * (1 - share)
        head = {"layer": 0, "head": 0, "trace": trace * 2, "temperature": 2.0, "eta": 3.0, "xi": 1.0}
        head |= {"localisation": 0.3, "normalised_entropy": 0.5, "near_mass": 0.5, "trace_of_square": 0.0}
        rows.append({"kind": "validation", "step": step, "loss": loss, "perplexity": math.exp(loss)})
        rows[-1] |= {"entropy": 0.5, "heads": [head]}
    folder = kept / stage / f"{arm}-seed{seed}"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def planted(kept: Path, *, end: float, early: float = 0.0, seeds: int = 5, stage: str = "A") -> Path:
    for seed in range(seeds):
        write(kept, "none", seed, end=0.0, trace=2.5, stage=stage)
        write(kept, "held", seed, end=end, early=early, trace=0.5, stage=stage)
    return kept


def test_a_planted_lead_is_found_with_its_size(tmp_path):
    arms = settled.read("A", planted(tmp_path, end=math.log(0.97)))
    ratio = settled.end_ratio(arms, "held")
    assert ratio.word == "lower" and math.exp(ratio.estimate.value) == pytest.approx(0.97, abs=0.002)
    untuned = settled.how_tuned("B", arms, tmp_path)
    assert "at one rate, not tuned" in settled.answer(arms, untuned) and "its own best rate" in settled.answer(arms)
    assert settled.answer(arms).startswith("**Yes.**") and "On WikiText-2 it ends 3.0 % lower. As" in said_limit(arms)
    assert said_advice(tmp_path).startswith("    Hold κ through the run: at [the end")
    assert "tr W ends at 2.50 λ without LocAteR, and at 0.50 λ with κ held" in settled.section(tmp_path)


def test_a_planted_null_is_no_lead_and_an_early_lead_is_told_as_one(tmp_path):
    null, early, behind = (tmp_path / name for name in ("null", "early", "behind"))
    arms = settled.read("A", planted(null, end=0.0))
    assert settled.answer(arms).startswith("**No.**") and "On WikiText-2 it ends level. As" in said_limit(arms)
    assert said_advice(null).startswith("    None, in a long run that is stable")
    arms = settled.read("A", planted(early, end=0.0, early=0.1))
    assert settled.answer(arms).startswith("**Only early.**") and ", and it leads only early." in said_limit(arms)
    assert "in a run that is stopped early" in " ".join(said_advice(early).split())
    arms = settled.read("A", planted(behind, end=0.03))
    assert "it ends 3.0 % higher." in said_limit(arms) and "it is behind (1.0" in " ".join(said_advice(behind).split())


def test_a_lead_that_lasts_but_is_not_sure_is_not_called_only_early(tmp_path):
    for seed in range(5):
        write(tmp_path, "none", seed, end=0.0)
        write(tmp_path, "held", seed, end=0.0)
        write(tmp_path, "released", seed, end=-0.0033 + 0.0015 * (seed - 2), early=0.1)
    arms = settled.read("A", tmp_path)
    assert settled.answer(arms).startswith("**Early, and at the end not sure.**")
    assert "lower, which may be chance, and it leads early." in said_limit(arms)


def test_words_at_a_tuned_rate_take_the_place_of_those_at_one_rate(tmp_path, monkeypatch):
    monkeypatch.setitem(settled.ENDS, "B", 10_000)
    planted(tmp_path, end=-0.03)
    (tmp_path / "A").rename(tmp_path / "B")
    assert settled.how_tuned("B", settled.read("B", tmp_path), tmp_path) == settled.UNTUNED
    for arm in ("none", "held"):
        for rate in settled.WORD_RATES:
            write(tmp_path, f"{arm}-{rate:g}", 100, end=0.0)
            (tmp_path / "B-rates").mkdir(exist_ok=True)
            shutil.move(tmp_path / "A" / f"{arm}-{rate:g}-seed100", tmp_path / "B-rates" / f"{arm}-{rate:g}")
    for seed in range(3):
        write(tmp_path, "none", seed, end=-0.05)
    (tmp_path / "A").rename(tmp_path / "B-tuned")
    arms = settled.read("B", tmp_path)
    assert settled.how_tuned("B", arms, tmp_path) == settled.TUNED and len(arms["none"]) == 3 and len(arms["held"]) == 5
    assert settled.end_ratio(arms, "held").word == "higher", "none at its better rate is what counts"


def test_two_forms_of_locater_are_two_chances(tmp_path):
    """A lead that one comparison would show is none among two; the better of two that lead is the one that is told."""
    weak, strong = tmp_path / "weak", tmp_path / "strong"
    for seed in range(5):
        for kept, lead in ((weak, 0.0033), (strong, 0.03)):
            write(kept, "none", seed, end=0.0)
            write(kept, "held", seed, end=0.0)
            write(kept, "released", seed, end=-lead + 0.0015 * (seed - 2))
    arms = settled.read("A", weak)
    assert settled.end_ratio(arms, "released").word == "lower" and settled.outcome(arms).word == "No"
    assert "On WikiText-2: 0.9" in said_limit(arms) and "(5 seeds, p = 0.0" in said_limit(arms)
    told = settled.outcome(settled.read("A", strong))
    assert (told.word, told.best) == ("Yes", "released")
    assert said_advice(strong).startswith("    Let κ go to 0 by a quarter of the run")


@pytest.mark.parametrize("end", [-0.03, 0.0, 0.03])
@pytest.mark.parametrize("early", [0.0, 0.1])
def test_the_readme_has_room_for_whatever_comes_out(tmp_path, end, early, monkeypatch):
    for stage in ("A-20000", "B"):
        monkeypatch.setitem(settled.ENDS, stage, 10_000)
    for stage in ("A", "A-20000", "B"):
        planted(tmp_path, end=end, early=early, stage=stage)
    text = settled_said.limit(**settled.outcomes(tmp_path))
    assert len(text.splitlines()) <= 6 and "5 % lower in perplexity than training without it" in text
    assert max(map(len, text.splitlines())) <= settled_said.COLUMNS
    assert max(len(part.split()) for part in text.split(". ")) <= 25
    assert len(said_advice(tmp_path).splitlines()) <= 4
    ends = {-0.03: "ends 3.0 % lower.", 0.0: "ends level.", 0.03: "ends 3.0 % higher."}
    assert f"With twice the steps it {ends[end]}" in " ".join(text.split())
    assert "5 seeds, rates tuned at 10,000 steps)." in " ".join(text.split())


def test_the_ratio_of_the_small_model_is_that_of_its_table():
    (line, _) = (line for line in settled.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| held |"))
    value, low, high = (math.exp(float(part.strip("[],"))) for part in line.split("|")[5].split())
    assert f"{value:.3f} [{low:.3f}, {high:.3f}]" == settled_said.SMALL_RATIO


def test_an_interval_shows_on_which_side_of_one_it_ends():
    ratio = settled_said.Ratio(settled.MeanEstimate(-0.003, -0.0062, 0.0001, 0.06, 5))
    assert str(ratio) == "0.9970 [0.9938, 1.0001]" and ratio.word == ""


def test_fewer_than_three_seeds_claim_nothing(tmp_path):
    planted(tmp_path, end=-0.5, seeds=2)
    text = settled.section(tmp_path)
    assert "There is no answer yet" in text and "too few seeds" in text and "Yes" not in text
    assert "is not settled" in said_limit(settled.read("A", tmp_path))
    assert "no gain has been shown yet" in " ".join(said_advice(tmp_path).split())
    assert "Seeds that have not ended: `none` 3, `held` 3, `released` 5 and `decay` 5." in text


def test_a_run_that_did_not_end_is_not_judged(tmp_path):
    write(planted(tmp_path, end=0.0, seeds=3), "released", 0, end=0.0, last=9000)
    assert "released" not in settled.read("A", tmp_path)


def test_steps_to_a_loss_lie_between_validations(tmp_path):
    run = settled.read("A", planted(tmp_path, end=0.0, seeds=1))["none"][0]
    first, second = (run.validations[step]["loss"] for step in (1000, 2000))
    assert settled.steps_to(run, (first + second) / 2) == pytest.approx(1500)
    assert settled.steps_to(run, 9.0) == 1000 and math.isnan(settled.steps_to(run, 1.0))


def test_rates_are_shown_from_the_tuning_seed(tmp_path):
    for name, end in (("held-0.003-0.001", 0.1), ("held-0.0015-0.001", 0.0)):
        write(tmp_path, name, 100, end=end)
        (tmp_path / "rates").mkdir(exist_ok=True)
        shutil.move(tmp_path / "A" / f"{name}-seed100", tmp_path / "rates" / name)
    shutil.rmtree(tmp_path / "A")
    assert settled.tuning(tmp_path).endswith("`held` 3.5834 (0.0015), 3.6834 (0.003).")


def test_a_deleted_row_is_seen(tmp_path):
    planted(tmp_path, end=math.log(0.97))
    before = settled.section(tmp_path)
    shutil.rmtree(tmp_path / "A" / "held-seed4")
    assert settled.section(tmp_path) != before


def test_pages_and_readme_say_what_the_kept_rows_do():
    page, readme, studies = (
        path.read_text(encoding="utf-8") for path in (settled.PAGE, settled.README, settled.STUDIES)
    )
    assert settled.section() in page, "write it anew: python runs/settled.py"
    assert settled_said.limit(**settled.outcomes()) in readme, "write it anew: python runs/settled.py"
    assert settled.BOX + said_advice() + "\n\n" in studies, "write it anew: python runs/settled.py"


def test_floors_are_those_of_the_studies_and_none_is_below_them():
    train, valid = (torch.randint(9, (count,), generator=torch.Generator().manual_seed(count)) for count in (900, 90))
    parts = train.numpy(), valid.numpy()
    data = Data(DataOptions(), WindowBatches(*parts, 8, 0), TokenData("", Words(tuple("abcdefghi")), *parts))
    expected = count_floors(data, valid[:-1], valid[1:])
    assert settled_floors.floors(train.numpy(), valid.numpy(), 9) == pytest.approx(expected)
    kept = json.loads(settled_floors.KEPT.read_text())
    for stage in "AB":
        losses = [settled.last_loss(run) for run in settled.read(stage)["none"].values()]
        assert max(losses) < kept[stage]["bigram"] - 0.05


@pytest.mark.parametrize("stage", ["A", "A-20000", "B"])
def test_every_kept_run_is_at_its_end_and_read(stage):
    kept = {
        path.parent.name
        for name in (stage, f"{stage}-tuned")
        for path in settled.KEPT.glob(f"{name}/*-seed*/metrics.jsonl")
    }
    assert kept == {f"{arm}-seed{seed}" for arm, runs in settled.read(stage).items() for seed in runs}
