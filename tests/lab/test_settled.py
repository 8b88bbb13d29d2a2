"""The claim at the end of training: what made-up rows say of it, and that the page says what the kept rows do."""

import importlib
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
from locater_lab.studies.statistics import MeanEstimate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "runs"))
import settled  # noqa: E402
import settled_floors  # noqa: E402
import settled_rows  # noqa: E402
import settled_said  # noqa: E402

SHARES = [n / 10 for n in range(1, 11)]  # of a run, at which it is validated


def said_limit(arms: settled.Arms) -> str:
    """On one line."""
    return " ".join(settled_said.limit(settled.outcome(arms)).split())


def said_advice(kept: Path = settled.KEPT) -> str:
    found = settled.outcomes(kept)
    return settled_said.advice(found["end"], found["longer"])


def write(
    kept: Path,
    arm: str,
    seed: int,
    *,
    end: float,
    early: float = 0.0,
    last: float = 1.0,
    trace=1.0,
    stage="A",
    rate=3e-3,
) -> Path:
    """A run whose loss falls from 5 to 3.6; `early` is its lead at first, `end` what is added at the end.

    It ends at the share `last` of its stage's steps.
    """
    noise = random.Random(f"{seed}{'twice' if stage == 'A-20000' else ''}").gauss(
        0, 0.02
    )  # of the seed, which the arms share
    own = 0.002 * (seed % 2 - 0.4 - 0.1 * (seed == 4)) * (arm == "held")  # of mean 0 over five
    own *= 1.5 if stage == "A-20000" else 1
    rows = [{"kind": "train", "step": 50, "loss": 7.0, "learning_rate": rate}]
    length = settled.ENDS[stage.removesuffix("-tuned")]
    for step in (round(share * length) for share in SHARES if share <= last):
        share = (10 * step / length - 1) / 9
        loss = 3.6 + 1.4 * (1 - share) ** 2 + noise + own + end * share - early * (1 - share)
        head = {"layer": 0, "head": 0, "trace": trace * 2, "temperature": 2.0, "eta": 3.0, "xi": 1.0}
        head |= {"localisation": 0.3, "normalised_entropy": 0.5, "near_mass": 0.5, "trace_of_square": 0.0}
        rows.append({"kind": "validation", "step": step, "loss": loss, "perplexity": math.exp(loss)})
        rows[-1] |= {"entropy": 0.5, "heads": [head]}
    folder = kept / stage / f"{arm}-seed{seed}"
    folder.mkdir(parents=True)
    (path := folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def planted(kept: Path, *, end: float, early: float = 0.0, seeds: int = 5, stage: str = "A") -> Path:
    for seed in range(seeds):
        write(kept, "none", seed, end=0.0, trace=2.5, stage=stage)
        write(kept, "held", seed, end=end, early=early, trace=0.5, stage=stage)
    return kept


def test_a_planted_lead_is_found_with_its_size(tmp_path):
    arms = settled.read("A", planted(tmp_path, end=math.log(0.97)))
    ratio = settled.end_ratio(arms, "held")
    assert ratio.word == "lower" and math.exp(ratio.estimate.value) == pytest.approx(0.97, abs=0.002)
    untuned = settled.answer(arms, settled.how_tuned("B", tmp_path))
    assert untuned.startswith("**Yes, at one rate.**") and "rate not tuned" in untuned
    assert "its own best rate" in settled.answer(arms)
    assert settled.answer(arms).startswith("**Yes.**") and "On WikiText-2 it ends 3.0 % lower. As" in said_limit(arms)
    assert "- In a long run that is stable: hold κ through it, at [the end" in said_advice(tmp_path)
    assert "tr W ends at 2.50 λ without LocAteR, and at 0.50 λ with κ held" in settled.section(tmp_path)


def test_a_planted_null_is_no_lead_and_an_early_lead_is_told_as_one(tmp_path):
    null, early, behind = (tmp_path / name for name in ("null", "early", "behind"))
    arms = settled.read("A", planted(null, end=0.0))
    assert settled.answer(arms).startswith("**No.**") and "On WikiText-2 it ends level. As" in said_limit(arms)
    assert "stable: none, at [the end of training](reproduction.md#at-the-end-of-training) no lead" in said_advice(null)
    arms = settled.read("A", planted(early, end=0.0, early=0.1))
    assert settled.answer(arms).startswith("**Only early.**") and ", and it leads only early." in said_limit(arms)
    assert "one that is stopped early: hold κ" in said_advice(early)
    arms = settled.read("A", planted(behind, end=0.03))
    assert "it ends 3.0 % higher." in said_limit(arms) and "it is behind: 1.030 [" in said_advice(behind)


def test_a_lead_that_lasts_but_is_not_sure_is_not_called_only_early(tmp_path):
    for seed in range(5):
        write(tmp_path, "none", seed, end=0.0)
        write(tmp_path, "held", seed, end=0.0)
        write(tmp_path, "released", seed, end=-0.0033 + 0.0015 * (seed - 2), early=0.1)
    arms = settled.read("A", tmp_path)
    assert settled.answer(arms).startswith("**Early, and at the end not sure.**")
    assert "lower, which may be chance, and it leads early." in said_limit(arms)


def move(kept: Path, source: str, target: str) -> None:
    (kept / target).parent.mkdir(exist_ok=True)
    shutil.move(kept / source, kept / target)


def words(kept: Path, monkeypatch, *, best: float) -> None:
    """Three seeds of words at a rate of 1e-3, and all rates on the tuning seed, of which one is the best for `none`."""
    monkeypatch.setattr(settled_rows, "WORD_RATES", (1e-3, 3e-3))
    for seed in range(3):
        for arm, end in (("none", 0.0), ("held", -0.03)):
            write(kept, arm, seed, end=end, stage="B", rate=1e-3)
    for arm in ("none", "held"):
        for rate in (1e-3, 3e-3):
            lead = -0.1 * (rate == (best if arm == "none" else 1e-3))
            write(kept, f"{arm}-{rate:g}", 100, end=lead, stage="B")
            move(kept, f"B/{arm}-{rate:g}-seed100", f"B-rates/{arm}-{rate:g}")


def test_words_are_tuned_once_each_arm_is_judged_at_its_best_rate(tmp_path, monkeypatch):
    words(tmp_path, monkeypatch, best=1e-3)
    assert settled.how_tuned("B", tmp_path) == settled_said.TUNED and not settled.words_untuned(tmp_path)
    assert "Rates of words, on the seed that is not judged, loss (rate): `none` 3.4834 (0.001), " in settled.section(
        tmp_path
    )
    shutil.rmtree(tmp_path / "B-rates" / "held-0.003")
    assert settled.how_tuned("B", tmp_path) == settled_said.UNTUNED
    assert "not afforded: 3 of the six runs" in settled.words_untuned(tmp_path)


def test_words_whose_best_rate_was_not_judged_are_not_tuned(tmp_path, monkeypatch):
    """All rates were tried, and `none` is better at another: it was judged at its best by no run yet."""
    words(tmp_path, monkeypatch, best=3e-3)
    assert settled.how_tuned("B", tmp_path) == settled_said.UNTUNED
    for seed in range(2):
        write(tmp_path, "none", seed, end=-0.05, stage="B-tuned", rate=3e-3)
    assert settled.how_tuned("B", tmp_path) == settled_said.UNTUNED
    assert settled.end_ratio(settled.read("B", tmp_path), "held").word == "lower", "two seeds replace none"
    write(tmp_path, "none", 2, end=-0.05, stage="B-tuned", rate=3e-3)
    assert settled.how_tuned("B", tmp_path) == settled_said.TUNED and settled.rates("B", tmp_path)["none"] == 3e-3
    assert settled.end_ratio(settled.read("B", tmp_path), "held").word == "higher", "none at its better rate counts"


def test_twice_the_steps_are_told_beside_the_first(tmp_path):
    """A lead that grows with the length, on the seeds that have both; `none` falls by a tenth."""
    planted(tmp_path, end=-0.003)
    for seed in range(3):
        write(tmp_path, "none", seed, end=-0.1, stage="A-20000")
        write(tmp_path, "held", seed, end=-0.13, stage="A-20000")
    told, page = settled.longer(tmp_path), settled.section(tmp_path)
    assert told.startswith("Twice the steps, and float32, bring `none` to 0.9") and "10,000 were no convergence" in told
    assert "at 20,000 (0.9" in told and ": it falls (the one over the other 0.97" in told
    assert "| byte pairs, 20,000 steps | 0.97" in page and "(reproduction_twice.png)" in page
    assert "; with twice the steps 0.97" in said_advice(tmp_path) and "hold κ through it" in said_advice(tmp_path)
    shutil.rmtree(tmp_path / "A-20000")
    assert not settled.longer(tmp_path) and "Not afforded: no run of `none` has ended." in settled.section(tmp_path)
    assert "within 0.1000 of its own in bfloat16,\nover 50 steps" in settled.precision(in_float32(tmp_path))


def in_float32(kept: Path) -> Path:
    """Rows of the tuning seed in both precisions; the training loss is 0.1 apart, the validation's only in one."""
    for part, loss in (("tune", 7.0), ("float32", 7.1)):
        folder = kept / part / "none-0.003"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 50, "loss": loss}) + "\n")
    return kept


def test_a_ratio_that_stays_is_not_said_to_move(tmp_path):
    planted(planted(tmp_path, end=-0.03), end=-0.03, seeds=3, stage="A-20000")
    assert "no change is seen" in settled.longer(tmp_path)


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
    assert "stable: let κ go to 0 by a quarter of it" in said_advice(strong)


@pytest.mark.parametrize("end", [-0.03, 0.0, 0.03])
@pytest.mark.parametrize("early", [0.0, 0.1])
def test_the_readme_has_room_for_whatever_comes_out(tmp_path, end, early):
    for stage in ("A", "A-20000", "B"):
        planted(tmp_path, end=end, early=early, stage=stage)
    text = settled_said.limit(**settled.outcomes(tmp_path))
    assert len(text.splitlines()) <= 6 and "5 % lower in perplexity than without it" in text
    assert max(map(len, text.splitlines())) <= settled_said.COLUMNS
    assert max(len(part.split()) for part in text.split(". ")) <= 25
    assert len(said_advice(tmp_path).splitlines()) == 3
    ends = {-0.03: "ends 3.0 % lower.", 0.0: "ends level.", 0.03: "ends 3.0 % higher."}
    assert f"With twice the steps it {ends[end]}" in " ".join(text.split())
    assert "5 seeds, rates tuned at 10,000 steps)." in " ".join(text.split())


def test_the_ratio_of_the_small_model_is_that_of_its_table():
    (line, _) = (line for line in settled.PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| held |"))
    value, low, high = (math.exp(float(part.strip("[],"))) for part in line.split("|")[5].split())
    assert f"{value:.3f} [{low:.3f}, {high:.3f}]" == settled_said.SMALL_RATIO


def test_an_interval_shows_on_which_side_of_one_it_ends():
    ratio = settled_said.Ratio(MeanEstimate(-0.003, -0.0062, 0.0001, 0.06, 5))
    assert str(ratio) == "0.9970 [0.9938, 1.0001]" and ratio.word == ""


def test_fewer_than_three_seeds_claim_nothing(tmp_path):
    planted(tmp_path, end=-0.5, seeds=2)
    text = settled.section(tmp_path)
    assert "There is no answer yet" in text and "too few seeds" in text and "Yes" not in text
    assert "is not settled" in said_limit(settled.read("A", tmp_path))
    assert "no gain has been shown yet" in " ".join(said_advice(tmp_path).split())
    assert "Seeds that have not ended: `none` 3, `held` 3, `released` 5 and `decay` 5." in text
    assert " and 0.6" in text.split("Seed by seed the ratio is 0.6")[1].split(" with κ held, which claims nothing")[0]


@pytest.mark.parametrize("arms", [("none",), ("held",), ("none", "held")])
@pytest.mark.parametrize("seeds", [0, 1, 2])
def test_a_stage_that_is_not_ended_says_how_far_it_came(tmp_path, monkeypatch, arms, seeds):
    """Taken from a folder in which some runs have ended and one is on its way; no claim of the longer stage is made."""
    planted(kept := tmp_path / "kept", end=-0.03)
    monkeypatch.setattr(settled, "KEPT", kept)
    before = said_advice(kept)
    for arm in arms:
        for seed in range(seeds):
            write(tmp_path / "rows", arm, seed, end=-0.1, stage="A-20000")
        write(tmp_path / "runs", arm, seeds, end=0.0, stage="A-20000", last=0.6)
    settled.take(tmp_path)
    text = settled.section(kept).partition("A over 20,000 steps")[2]
    missing = [f"`{arm}` {3 - seeds if arm in arms else 3}" for arm in ("none", "held")]
    assert f"Seeds that have not ended: {' and '.join(missing)} (`{arms[-1]}-seed{seeds}` is at step 12,000" in text
    assert said_advice(kept) == before and "Twice the steps" not in text and "in 20,000 steps" not in text
    assert ("(reproduction_twice.png)" in text) == (seeds > 0 and "none" in arms)


def test_rows_that_are_kept_give_way_only_to_longer_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(settled, "KEPT", tmp_path / "kept")
    path = write(tmp_path / "kept", "none", 0, end=0.0)
    whole = path.read_text()
    write(tmp_path / "runs", "none", 0, end=0.5, last=0.6)
    settled.take(tmp_path)
    assert path.read_text() == whole
    write(tmp_path / "rows", "none", 0, end=0.5)
    settled.take(tmp_path)
    assert path.read_text() != whole


def test_a_run_that_did_not_end_is_not_judged(tmp_path):
    write(planted(tmp_path, end=0.0, seeds=3), "released", 0, end=0.0, last=0.9)
    assert "released" not in settled.read("A", tmp_path)


def test_steps_to_a_loss_lie_between_validations(tmp_path):
    run = settled.read("A", planted(tmp_path, end=0.0, seeds=1))["none"][0]
    first, second = (run.validations[step]["loss"] for step in (1000, 2000))
    assert settled_rows.steps_to(run, (first + second) / 2) == pytest.approx(1500)
    assert settled_rows.steps_to(run, 9.0) == 1000 and math.isnan(settled_rows.steps_to(run, 1.0))


def test_rates_are_shown_from_the_tuning_seed(tmp_path):
    for name, end in (("held-0.003-0.001", 0.1), ("held-0.0015-0.001", 0.0)):
        write(tmp_path, name, 100, end=end)
        (tmp_path / "rates").mkdir(exist_ok=True)
        shutil.move(tmp_path / "A" / f"{name}-seed100", tmp_path / "rates" / name)
    shutil.rmtree(tmp_path / "A")
    assert settled.tuning(tmp_path).endswith("`held` 3.5834 (0.0015), 3.6834 (0.003).")


ROWS = [
    path.parent.relative_to(settled.KEPT).as_posix()
    for pattern in ("*/*-seed0", "rates/*", "B-rates/*")
    for path in sorted(settled.KEPT.glob(f"{pattern}/metrics.jsonl"))
]


@pytest.mark.parametrize("run", ROWS)
def test_a_deleted_row_is_seen(run, tmp_path):
    """Without one run the page would say something else than it does: a seed of every arm, and all tuned rates."""
    shutil.copytree(settled.KEPT, tmp_path / "kept")
    shutil.rmtree(tmp_path / "kept" / run)
    assert settled.section(tmp_path / "kept") not in settled.PAGE.read_text(encoding="utf-8")


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
def test_every_kept_run_is_read_or_told_as_on_its_way(stage):
    kept = {
        path.parent.name
        for name in (stage, f"{stage}-tuned")
        for path in settled.KEPT.glob(f"{name}/*-seed*/metrics.jsonl")
    }
    ended = {f"{arm}-seed{seed}" for arm, runs in settled.read(stage).items() for seed in runs}
    begun = settled.begun_runs(stage)
    assert kept == ended | begun.keys() and (stage == "A-20000" or not begun)
    assert all(f"`{name}` is at step {step:,}" in settled.section() for name, step in begun.items())


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "runs").glob("*.py")))
def test_every_script_finds_what_it_imports(name):
    """A script takes functions of another, and most run too long for a test."""
    importlib.import_module(name)
