"""Studies that train: their own loop, what they change in it, and what they measure, each against a known answer."""

import math
import random
from pathlib import Path

import pytest
import torch

from locater.attention.interception import Interception
from locater.spectra import moments
from locater.stabilisers import Stabiliser
from locater_lab.studies import (
    depth,
    interventions,
    localisation_helps,
    mechanism,
    metrics,
    rivals,
    sensitivity,
    small,
)
from locater_lab.studies import spectrum_vs_attention as spectrum
from locater_lab.studies.floors import ARMS as FLOORS
from locater_lab.studies.floors import FLOOR_SEEDS
from locater_lab.studies.study import find_study

RANDOM = random.Random(1)


def config(**changed):
    return small.tiny(0, **{"steps": 3, "warmup": 1, "context": 16, "batch": 2, **changed})


@pytest.fixture(scope="module")
def ran():
    return small.train_small(config(steps=12, batch=4))


def test_the_loop_is_the_trainers(tmp_path, ran):
    """The same losses to rounding, step by step, as `locater train` has them."""
    from locater_lab.train import run
    from locater_lab.train.metrics import read_metrics

    run.start(config(steps=12, batch=4, log_every=1, validation_windows=4), tmp_path / "r", say=lambda said: None)
    theirs = [row["loss"] for row in read_metrics(tmp_path / "r" / "metrics.jsonl") if row["kind"] == "train"]
    assert ran.losses == pytest.approx(theirs, rel=1e-4) and len(theirs) == 12


def test_a_loss_that_is_no_number_ends_a_run():
    def poison(model):
        model.embedding.weight.data[:] = math.nan
        return Stabiliser()

    broken = small.train_small(config(), poison)
    assert not broken.is_finite and len(broken.losses) == 1
    assert small.validation_loss(broken) == pytest.approx(math.log(512)) and small.result(broken)["entropy"] == 0


def weights_of(model) -> torch.Tensor:
    """What the first layer's kernel makes of a text, with everything that stands between."""
    seen = []

    def see(call):
        seen.append(call.masked(call.raw()).softmax(-1))

    with torch.no_grad(), Interception(see):
        model(torch.arange(16)[None])
    return seen[0][0]


def test_windows_and_temperatures_do_what_they_say(ran):
    plain = weights_of(ran.model)
    window = interventions.Window(ran.model, 3)
    found = weights_of(ran.model)
    assert (found.tril(-3) == 0).all() and (found.triu(1) == 0).all()
    expected = plain[:, 9, 7:10] / plain[:, 9, 7:10].sum(-1, keepdim=True)
    torch.testing.assert_close(found[:, 9, 7:10], expected)
    window.detach()
    temperature = interventions.Temperature(ran.model, 2.0)
    expected = plain.square() / plain.square().sum(-1, keepdim=True)
    torch.testing.assert_close(weights_of(ran.model), expected, rtol=1e-4, atol=1e-6)
    temperature.detach()
    torch.testing.assert_close(weights_of(ran.model), plain)


def test_a_held_spectrum_is_held_while_the_rest_learns():
    held = small.train_small(config(steps=6), lambda model: interventions.HeldAttention(model, xi=-1.5, eta=0.4))
    for pair in held.stabiliser.pairs:
        query, key = (side.view(side.weight.read()).double() for side in (pair.query, pair.key))
        found = moments(query, key)
        torch.testing.assert_close(found.xi, torch.full_like(found.xi, -1.5), rtol=1e-2, atol=0)
        torch.testing.assert_close(found.eta / pair.temperature, torch.full_like(found.eta, 0.4), rtol=1e-4, atol=0)
    other = small.train_small(config(steps=6))
    assert held.losses[-1] != other.losses[-1]


def test_every_rival_has_as_many_trials():
    assert {len(rival.tried) for rival in rivals.RIVALS.values()} == {5}


def test_every_rival_trains_and_is_measured(monkeypatch):
    monkeypatch.setattr(rivals, "trained", lambda seed, steps, **changed: config(**changed | {"steps": 2}))
    for name, rival in rivals.RIVALS.items():
        row = rivals._row(rival, rival.tried[1], 1e-2, 0, 2)
        assert 0 < row["loss"] < 8 and 0 < row["entropy"] < 1.001 and row["milliseconds"] > 0, name


def rated(effect: float) -> list[dict]:
    """Arms over learning rates: `steady` is lower by the effect at the largest rate."""
    return [
        {"arm": arm, "seed": seed, "learning_rate": rate, "start": 6.0, "entropy": 0.5, "milliseconds": 5.0}
        | {"loss": 4.0 + (rate == 1.0) * (1.5 - effect * (arm == "steady")) + 0.01 * RANDOM.random()}
        for arm in ("none", "steady")
        for seed in range(3)
        for rate in (0.01, 0.1, 1.0)
    ]


def test_rivals_find_a_planted_sensitivity_and_no_other():
    assert rivals.sensitivity([4.0, 5.0, math.inf], start=6.0) == pytest.approx((0 + 1 + 2) / 3)
    planted = {one.what: one.verdict for one in rivals.conclude(rated(1.4)).findings}
    assert planted["learning-rate sensitivity"] == "lower" and planted["best validation loss"] == "no difference seen"
    null = {one.what: one.verdict for one in rivals.conclude(rated(0.0)).findings}
    assert null["learning-rate sensitivity"] == "no difference seen"


def test_a_better_best_loss_is_not_taken_for_more_sensitivity_alone():
    """An arm that is better at one rate and equal at the others: its sensitivity rises, its mean loss does not."""
    rows = rated(0.0)
    rows = [
        row | {"loss": row["loss"] - 0.3 * (row["arm"] == "steady" and row["learning_rate"] == 0.01)} for row in rows
    ]
    found = {one.what: one.verdict for one in rivals.conclude(rows).findings}
    assert found["best validation loss"] == "lower" and found["learning-rate sensitivity"] == "higher"
    assert found["mean loss over learning rates"] == "lower", "the rate at which it is better counts"


def test_a_gain_at_one_rate_that_another_takes_back_is_no_gain_over_rates():
    """The confounder of sensitivity: better at its best rate, as much worse at another, equal on average."""
    change = {0.01: -0.3, 1.0: 0.3}
    rows = [
        row | {"loss": row["loss"] + (row["arm"] == "steady") * change.get(row["learning_rate"], 0.0)}
        for row in rated(0.0)
    ]
    found = {one.what: one.verdict for one in rivals.conclude(rows).findings}
    assert found["best validation loss"] == "lower" and found["learning-rate sensitivity"] == "higher"
    assert found["mean loss over learning rates"] == "no difference seen"


def failing(**losses: float) -> list[dict]:
    """Arms that are alike at a rate of 0.01, and have these losses at 1."""
    return [
        {"arm": arm, "seed": seed, "learning_rate": rate, "start": 6.0, "entropy": 0.5, "milliseconds": 5.0}
        | {"loss": (loss if rate == 1.0 else 4.0) + 0.01 * RANDOM.random()}
        for arm, loss in ({"none": 5.0} | losses).items()
        for seed in range(3)
        for rate in (0.01, 1.0)
    ]


@pytest.mark.parametrize(
    ("normed", "uniform", "blamed"), [(4.2, 5.1, [1.0]), (4.2, 4.4, []), (5.0, 5.1, []), (4.2, None, [])]
)
def test_a_failure_is_blamed_on_attention_by_a_positive_control(normed, uniform, blamed):
    """Uniform attention that helps as well is another failure; where it is missing, or QK-norm no help, none is."""
    losses = {"QK-norm": normed, "LocAteR": 4.3} | ({rivals.UNIFORM: uniform} if uniform else {})
    rows = failing(**losses)
    answer = rivals.conclude(rows)
    assert rivals.blamed_on_attention(rivals.by_rate(rows)) == blamed
    assert ("at 1: lower for QK-norm" in answer.second and "LocAteR" in answer.second) == bool(blamed)
    assert not [one for one in answer.findings if one.of == rivals.UNIFORM and "rate of" not in one.what]


def test_a_rival_is_tuned_on_other_seeds_than_it_is_judged_by(monkeypatch):
    seen = []

    def run(rival, setting, rate, seed, steps):
        seen.append((setting, rate, seed))
        return seed, setting, rate

    rivals.tuned.cache_clear()
    monkeypatch.setattr(rivals, "_run", run)
    monkeypatch.setattr(rivals, "validation_loss", lambda found: abs(found[1] - 1e-2))
    monkeypatch.setattr(rivals, "_row", lambda rival, setting, rate, seed, steps: (setting, rate, seed))
    point = {"arm": "LocAteR", "seed": 2, "steps": 5, "rates": [1e-3, 1e-2]}
    assert rivals.measure(point, Path()) == [(1e-2, 1e-3, 2), (1e-2, 1e-2, 2)]
    assert seen == [(setting, rivals.BASE, rivals.TUNING) for setting in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)]
    assert rivals.TUNING not in small.seeds(False)
    rivals.tuned.cache_clear()


def test_metrics_are_what_they_say(ran):
    logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 0.1], [0.0, 0.1]])
    sure, unsure = (float(row.softmax(-1).max()) for row in (logits[0], logits[2]))
    error = metrics.calibration_error(logits, torch.tensor([0, 1, 1, 1]))
    assert error == pytest.approx((abs(0.5 - sure) + abs(1 - unsure)) / 2)
    losses, targets = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0, 1, 2]])
    assert metrics.by_frequency(losses, targets, torch.tensor([9, 1, 5])) == (2.0, 1.0)
    one, other = torch.tensor([3.0, 1.0]), torch.tensor([3.0, -1.0])  # mean (3, 0), tr Σ = 2, |G|² = 9 − 1
    assert metrics.gradient_noise([one, other]) == pytest.approx(math.log10(2 / 8))
    found = metrics.numbers(ran)
    assert {"copying", "effective_rank", "rare_loss"} <= found.keys() and found["rare_loss"] > found["frequent_loss"]


def test_copying_is_seen_where_it_is_built_in(ran):
    class Copier(torch.nn.Module):
        config = ran.model.config

        def forward(self, tokens):
            logits = torch.zeros(*tokens.shape, self.config.vocab_size)
            half = self.config.context // 2
            for place in range(half - 1, 2 * half - 1):
                logits[:, place] = 9 * torch.nn.functional.one_hot(tokens[:, place + 1 - half], self.config.vocab_size)
            return logits

    copier = small.Ran(Copier(), ran.data, ran.stabiliser, [1.0], 0.0)
    assert metrics.copying(copier) > 3 > 0.5 > abs(metrics.copying(ran))


def test_metrics_that_move_are_told_from_those_that_do_not():
    """Over arms, and against none; an arm's own effect, the same on all seeds, is no relation with where it looks.

    Its rank correlation is 0.89: chance among nine measures of seven arms, which 35 points would not be.
    """
    own, names = (0, 2, 1, 4, 3, 6, 5), ("none", "window 8", "LocAteR", "ξ", "temperature 3", "far", "window 2")
    rows = [
        {"condition": "", "arm": arm, "seed": seed, "near_mass": n / 6}
        | {name: own[n] + 0.01 * RANDOM.random() for name in metrics.METRICS}
        | {"copying": n + 0.1 * RANDOM.random(), "rare_loss": RANDOM.random()}
        for n, arm in enumerate(names)
        for seed in range(5)
    ]
    found = metrics.conclude(rows).findings
    relations = {one.of: one.verdict for one in found if one.kind == "relation"}
    assert relations.pop("copying") == "rises" and set(relations.values()) == {"no relation seen"}
    window = {one.of: one.verdict for one in found if one.what == "window 2 − none"}
    assert window["copying"] == "higher" and window["loss of rare tokens"] == "no difference seen"


def test_gradient_reaches_the_tokens_that_attention_sees(ran):
    tokens, targets = ran.data.batches.validation(0, 4)
    window = interventions.Window(ran.model, 2)
    (share,) = depth.gradient_shares(ran.model, tokens, targets)
    window.detach()
    assert share[:-2].max() == 0 and share.sum() == pytest.approx(1, abs=1e-5) and share[-2] > 0
    walk = torch.randn(400, 16, 4, generator=torch.Generator().manual_seed(0)).cumsum(1)
    torch.testing.assert_close(depth.step_covariance(walk), torch.eye(4, dtype=torch.float64), atol=0.15, rtol=0)
    found = depth.agreement(ran)
    assert all(len(found[name]) <= 1 and all(-1 <= one <= 1 for one in found[name]) for name in depth.OVER_RHO)


def test_an_edited_model_has_the_attention_of_its_spectrum():
    spectrum._trained.cache_clear()
    flat, sharp = (spectrum.edited(0, 0, 0.0, eta) for eta in (0.01, 3.0))
    assert flat["entropy"] > 0.99 > sharp["entropy"] and flat["loss_before"] == sharp["loss_before"]


def test_rows_of_small_runs_are_what_was_set():
    row = localisation_helps.measure({"condition": "text", "arm": "window 2", "seed": 0, "steps": 2}, Path())
    assert row["near_mass"] == pytest.approx(1) and row["kind"] == "window"  # two keys are among the last four
    row = sensitivity.measure({"condition": "half the width", "arm": "none", "seed": 0, "steps": 2}, Path())
    assert row["directions"] <= 16 and 0 < row["best_loss"] < 8  # two heads of 16 dimensions each
    point = {"arm": "locater", "condition": "2 layers, no warm-up", "seed": 0, "steps": 2}
    row = depth.measure(point, Path())
    assert len(row["agreement"]) == 2 and all(-1 <= one <= 1 for one in row["agreement"] + row["agreement_at_place"])


def test_a_start_that_climbs_is_told_from_one_that_stays():
    def said(start: tuple[float, ...]) -> str:
        scales = {"none": (0.9, 0.91, 0.92), "locater-1e-2": (0.12, 0.13, 0.11), "start": start}
        return mechanism.conclude(
            [
                {"condition": "", "arm": arm, "seed": seed, "eta_over_temperature": eta, "best_loss": 5.0 + 0.1 * seed}
                for arm, some in scales.items()
                for seed, eta in enumerate(some)
            ]
        ).first

    assert "the holding and not the start" in said((0.46, 0.48, 0.47)) and "no difference" in said((0.11, 0.13, 0.12))


def test_gradient_that_follows_rho_is_told_from_gradient_that_only_grows_with_it():
    def verdicts(crude: tuple[float, ...], at_place: tuple[float, ...]) -> dict[str, str]:
        rows = [
            {"condition": "1 layer, warm-up", "arm": arm, "seed": seed, "best_loss": 5.0}
            | {"agreement": [crude[seed]], "agreement_at_place": [at_place[seed]]}
            for arm in ("none", "locater")
            for seed in range(3)
        ]
        return {one.what: one.verdict for one in depth.conclude(rows).findings if one.kind == "relation"}

    over, at_places = depth.OVER_RHO.values()
    follows, quiet = (0.8, 0.82, 0.79), (0.3, -0.4, 0.1)
    assert verdicts(follows, quiet) == {over: "rises", at_places: "no relation seen"}
    assert verdicts(quiet, follows) == {over: "no relation seen", at_places: "rises"}


def test_a_small_start_is_a_start_and_not_a_hold():
    row = mechanism.measure({"arm": "start", "seed": 0, "steps": 4}, Path())
    assert row["course"]["0"] == pytest.approx(mechanism.SMALL, rel=0.05) and row["directions"] > 1


@pytest.mark.parametrize("name", ["mechanism", "localisation-helps", "metrics", "sensitivity", "rivals", "depth"])
def test_grids_are_complete_and_paired(name):
    points = find_study(name).grid(False)
    arms = {}
    for point in points:
        rest = {key: value for key, value in point.items() if key not in ("seed", "name")}
        arms.setdefault(str(rest), set()).add(point["seed"])
    for arm, seeds in arms.items():  # floors are far off, and need fewer
        is_floor = name != "rivals" and any(f"'arm': '{floor}'" in arm for floor in FLOORS)
        assert seeds == set(range(FLOOR_SEEDS) if is_floor else small.seeds(False))
    assert set(localisation_helps.ARMS) == set(localisation_helps.KIND_OF)
