"""Floors under the tables of trained models, the tasks beside text, and a study that may not conclude."""

import math
from collections import Counter

import pytest
import torch

from locater_lab.studies import interventions as tasks
from locater_lab.studies import mechanism, rivals, small
from locater_lab.studies.floors import ARMS, Floors, bigrams, count_floors, floors, unigrams
from locater_lab.studies.study import document


@pytest.fixture(scope="module")
def ran():
    return small.train_small(small.tiny(0, steps=2, warmup=1, context=16, batch=2))


def test_tables_are_shares_of_what_was_counted():
    tokens = torch.tensor([0, 1, 0, 1, 2, 0, 1])
    singles, pairs = unigrams(tokens, 4).exp(), bigrams(tokens, 4, 2.0).exp()
    counts = Counter(tokens.tolist())
    assert singles.tolist() == pytest.approx([(counts[word] + 1) / (7 + 4) for word in range(4)], rel=1e-6)
    assert pairs.sum(1).tolist() == pytest.approx([1.0] * 4, rel=1e-6)
    assert float(pairs[0, 1]) == pytest.approx((3 + 2 * float(singles[1])) / (3 + 2), rel=1e-6)
    assert pairs[3].tolist() == pytest.approx(singles.tolist(), rel=1e-6)  # never followed by anything: the unigram


def test_floors_of_text_lie_in_order(ran):
    found = count_floors(ran.data, *ran.data.batches.validation(0, 64))
    assert 0 < found["bigram"] < found["unigram"] < math.log(512)


@pytest.mark.parametrize(
    ("none", "bigram", "uniform", "reason"),
    [
        (3.5, 3.7, 3.6, ""),
        (3.68, 3.7, 3.8, "a bigram table"),
        (3.5, 3.7, 3.52, "uniform attention has"),
        (3.5, None, 3.6, "not measured"),
    ],
)
def test_a_floor_that_is_not_beaten_is_named(none, bigram, uniform, reason):
    shortfall = Floors("", none, 5.3, bigram, 4.0, uniform).shortfall
    assert (reason in shortfall) if reason else shortfall == ""


def rows_of(loss: float, **tables: float) -> list[dict]:
    """Rows of `mechanism` with a planted difference of 0.2, on three seeds."""
    losses = {"none": loss, "locater-1e-2": loss - 0.2} | dict.fromkeys(ARMS, 3.9)
    return [
        {
            "point": {"name": f"{arm}{seed}", "condition": "", "arm": arm, "seed": seed},
            "result": {"best_loss": value + 0.01 * seed * (arm == "none"), "course": {}} | tables,
        }
        for arm, value in losses.items()
        for seed in range(3)
    ]


def test_nothing_is_concluded_below_the_floors():
    tables = {"unigram": 5.3, "bigram": 3.8}
    above = document("mechanism", rows_of(3.5, **tables), num_points=12)
    assert "lower for locater-1e-2" in above["answer"][1] and "`none` 3.510" in above["floors"][0]
    assert not {one["of"] for one in above["findings"]} & set(ARMS), "a floor is no arm"
    for rows in (rows_of(3.8, **tables), rows_of(3.5)):
        below = document("mechanism", rows, num_points=12)
        assert below["answer"][0].startswith("No conclusion: ") and not below["findings"]


def test_floors_are_judged_by_condition_and_at_the_best_rate():
    rows = [row["point"] | row["result"] | {"condition": "a"} for row in rows_of(3.5, unigram=5.3, bigram=3.8)]
    rows += [row | {"condition": "b", "bigram": 3.4} for row in rows]
    assert [(one.condition, bool(one.shortfall)) for one in floors(rows)] == [("a", False), ("b", True)]
    rated = [{"arm": "none", "seed": 0, "loss": loss, "learning_rate": loss} for loss in (4.0, 3.5, 3.9)]
    assert [row["best_loss"] for row in rivals.at_best_rate(rated)] == [3.5]


def test_tokens_come_again_after_the_lag(ran):
    far, mixed = tasks.far(ran.data), tasks.with_repeats(ran.data)
    tokens, targets = far.batches.training(5, 3)
    assert torch.equal(tokens[:, 1:], targets[:, :-1]) and torch.equal(tokens[:, 8:], tokens[:, :8])
    assert int(tokens.max()) < tasks.NUM_WORDS and count_floors(far, tokens, targets)["bigram"] <= math.log(64)
    assert not torch.equal(far.batches.validation(5, 3)[0], tokens)
    one, other = mixed.batches.training(6, 2)[0]
    assert torch.equal(one, ran.data.batches.training(3, 1)[0][0])
    assert any(torch.equal(other[lag:], other[:-lag]) for lag in range(4, 9))
    assert torch.equal(mixed.batches.validation(0, 2)[0], ran.data.batches.validation(0, 2)[0])


def test_a_cold_run_has_the_rates_of_the_others_behind_the_warm_up(monkeypatch):
    def rates(*, is_cold: bool) -> list[float]:
        seen = []
        monkeypatch.setattr(small, "set_rate", lambda optimizer, rate: seen.append(rate))
        small.train_small(small.trained(0, 8, warmup=3, context=16, batch=2), is_cold=is_cold)
        return seen

    warm, cold = rates(is_cold=False), rates(is_cold=True)
    assert warm[3:] == cold[3:] and cold[0] == cold[2] == cold[3] > warm[0]


def test_the_setting_of_a_study_is_that_which_was_searched_for():
    assert mechanism.grid(False)[0]["steps"] == small.STEPS
