"""Alarms on models made to be wrong, and silence on one that is not."""

import math

import pytest
import torch
from test_monitor import TOKENS, find_alarms, gpt2, llama, watch

from locater.monitor import AttentionMonitor, Thresholds
from locater.monitor.alarms import BACK, SLOWLY
from locater.stabilisers import LocAteR, QKClip, QKNorm

pytestmark = pytest.mark.quick

LONG = torch.randint(0, 50, (2, 60), generator=torch.Generator().manual_seed(3))


def kinds(report):
    return {(alarm.kind, alarm.layer, alarm.heads) for alarm in report.alarms}


def scale_head(model, layer, head, factor):
    attention = model.model.layers[layer].self_attn
    with torch.no_grad():
        attention.q_proj.weight.unflatten(0, (4, -1))[head] *= factor


def test_a_healthy_model_raises_none():
    model = llama()
    assert not watch(model, lambda: model(LONG)).alarms


def test_entropy_collapse_and_logit_explosion_name_the_head():
    model = llama()
    scale_head(model, 1, 2, 1e4)
    report = watch(model, lambda: model(LONG))
    assert kinds(report) == {("entropy collapse", 1, (2,)), ("logit explosion", 1, (2,))}
    collapse = next(alarm for alarm in report.alarms if alarm.kind == "entropy collapse")
    assert collapse.figure < collapse.threshold == 0.02
    assert str(collapse).startswith("entropy collapse: decoder layer 1, head 2, lowest normalised entropy ")
    assert str(collapse).endswith("threshold 0.02; try RollBack: the last good state with a lower learning rate")
    assert [alarm.kind for alarm in report.alarms] == ["logit explosion", "entropy collapse"], "the worst first"
    assert report.metrics()["attn/alarms"] == 2
    assert str(collapse).partition("; try")[0] in report.summary() and report.summary().count("; try") == 1, "once"


def test_a_head_of_equal_logits_is_dead():
    model = llama()
    scale_head(model, 0, 1, 1e-6)
    report = watch(model, lambda: model(LONG))
    assert kinds(report) == {("dead heads (uniform)", 0, (1,))}


def test_a_head_that_rests_on_the_first_token_is_dead():
    """Queries that do not depend on the text, and keys that only know whether they are the first."""
    model = gpt2().eval()
    with torch.no_grad():
        attention, size = model.transformer.h[0].attn.c_attn, 8
        model.transformer.h[0].ln_1.weight.fill_(1)
        attention.weight[:, :size] = 0
        attention.bias[:size] = 0
        attention.bias[0] = 30.0
        model.transformer.wpe.weight[:, 5] = -1.0
        model.transformer.wpe.weight[0, 5] = 30.0
        attention.weight[:, 32] = 0
        attention.weight[5, 32] = 2.0
    report = watch(model, lambda: model(LONG), thresholds=Thresholds(entropy_collapse=None, logit_explosion=None))
    assert ("dead heads (sink)", 0, (0,)) in kinds(report)
    assert all(alarm.mode == "evaluation" for alarm in report.alarms)


def test_tokens_that_are_alike_are_rank_collapse():
    model = gpt2().eval()
    with torch.no_grad():
        model.transformer.wte.weight[:] = model.transformer.wte.weight[:1] + 1e-3 * torch.randn(50, 32)
        model.transformer.wpe.weight.zero_()
    report = watch(model, lambda: model(LONG))
    collapse = [alarm for alarm in report.alarms if alarm.kind == "rank collapse"]
    assert collapse and collapse[0].heads == () and "residual" in collapse[0].meaning


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_is_named_where_it_begins_and_hides_nothing_else(wrong):
    """A token of one text breaks its own query and the nine that follow; kernels may spread it further in that text."""
    model = llama()
    tokens = LONG % 40
    tokens[1, 50] = 49
    with torch.no_grad():
        model.model.embed_tokens.weight[49] = wrong
    report = watch(model, lambda: model(tokens))
    assert kinds(report) == {("not finite", 0, ()), ("not finite", 1, ())}
    assert "share of queries with NaN or infinite logits 0." in report.alarms[0].meaning
    assert report.training[0].rows_not_finite == 10 <= report.training[1].rows_not_finite <= 60
    assert math.isfinite(report.metrics()["attn/layer_01/entropy"])
    assert min(alarm["figure"] for alarm in report.to_json()["alarms"]) == pytest.approx(10 / 120)


@pytest.mark.parametrize("repeats", [1, 4])
def test_thresholds_do_not_depend_on_length(repeats):
    """Uniform over a fixed share of the keys, or ten times log n: the same verdict at any length."""
    model = llama()
    report = watch(model, lambda: model(LONG.repeat(1, repeats)))
    (layer, _) = report.training
    limit = 10 * layer.log_keys
    strict = Thresholds(logit_explosion=max(layer.statistics["max_logit"]) / layer.log_keys * 1.01)
    assert not [alarm for alarm in find_alarms([layer], strict) if alarm.kind == "logit explosion"]
    looser = Thresholds(logit_explosion=max(layer.statistics["max_logit"]) / layer.log_keys * 0.99)
    assert [alarm for alarm in find_alarms([layer], looser) if alarm.kind == "logit explosion"]
    assert math.isclose(layer.log_keys, sum(math.log(n) for n in range(1, 60 * repeats + 1)) / (60 * repeats))
    assert limit > 20


def test_alarms_can_be_switched_off():
    model = llama()
    scale_head(model, 1, 2, 1e4)
    none = Thresholds(None, None, None, None, None)
    with AttentionMonitor(model, every=1, thresholds=none) as monitor:
        model(TOKENS)
        assert not monitor.report().alarms


def fresh(std=1e-4):
    """As models are initialised whose first logits are all but equal."""
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
                torch.nn.init.normal_(weight, std=std)
    return model


def uniform(report):
    return [alarm for alarm in report.alarms if alarm.kind == "dead heads (uniform)"]


def test_a_fresh_model_is_not_dead_until_it_had_time_to_learn():
    model = fresh()
    with AttentionMonitor(model, every=1) as monitor:
        for step, is_dead in ((0, False), (100, False), (999, False), (1001, True)):
            monitor.num_steps = step
            model(LONG)
            assert bool(uniform(monitor.report())) == is_dead, step


def test_heads_that_told_keys_apart_before_are_dead_at_once():
    model, good = fresh(), llama()
    learned = {name: value.clone() for name, value in good.state_dict().items()}
    started = {name: value.clone() for name, value in model.state_dict().items()}
    with AttentionMonitor(model, every=1) as monitor:
        for state, is_dead in ((started, False), (learned, False), (started, True)):
            model.load_state_dict(state)
            model(LONG)
            report = monitor.report()
            assert bool(uniform(report)) == is_dead
            monitor.num_steps += 1
        kept = monitor.state_dict()
    with AttentionMonitor(model, every=1) as resumed:
        resumed.load_state_dict(kept)
        model(LONG)
        assert uniform(resumed.report())


def test_an_alarm_is_told_once_in_full_and_counted_each_time():
    model = llama()
    scale_head(model, 1, 2, 1e4)
    with AttentionMonitor(model, every=1) as monitor:
        told = []
        for step in range(3):
            if step == 2:
                scale_head(model, 1, 0, 1e4)
            model(LONG)
            report = monitor.report()
            told.append([str(alarm) for alarm in report.alarms])
            assert report.metrics()["attn/alarms"] == 2
            monitor.num_steps += 100
    assert all("; try " in line for line in told[0])
    assert told[1][0].startswith("logit explosion: decoder layer 1, head 2, still, since step 0 (")
    assert all("; try " in line for line in told[2]), "another head has joined"


def test_growth_without_measure_asks_for_a_lower_learning_rate():
    model = llama()
    with AttentionMonitor(model, every=1) as monitor:
        model(LONG)
        monitor.report()
        monitor.num_steps = 10
        scale_head(model, 1, 2, 1e4)
        model(LONG)
        (explosion,) = [alarm for alarm in monitor.report().alarms if alarm.kind == "logit explosion"]
    assert explosion.remedy == f"{BACK}, or {SLOWLY}"


def test_what_is_attached_to_the_model_is_not_advised():
    model = llama()
    scale_head(model, 1, 2, 1e4)

    def remedies():
        return {alarm.kind: alarm.remedy for alarm in watch(model, lambda: model(LONG)).alarms}

    norm = QKNorm(model)
    assert AttentionMonitor(model)._attached() == {"QKNorm"}
    norm.detach()
    clip, locater = QKClip(model, threshold=1e9), LocAteR(model, strength="auto")
    assert remedies() == {"logit explosion": BACK, "entropy collapse": BACK}
    assert AttentionMonitor(model)._attached() == {"QKClip", "LocAteR"}
    assert "qk/strength" in locater.metrics() and "(auto, not settled yet)" in repr(locater)
    clip.detach()
    locater.detach()
    assert not AttentionMonitor(model)._attached()
