"""What follows an alarm: actions in own loops and in trainers, remedies, trends, and numbers of the weights."""

import copy
import math
import types
from dataclasses import replace

import pytest
import torch
from test_monitor import TOKENS, find_alarms, gpt2, llama, watch
from test_sinks import Texts
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Trainer, TrainingArguments

import hand_written
from locater.errors import Refusal
from locater.integrations.hugging_face import AttentionCallback
from locater.models.live.rate_factor import current_factor
from locater.monitor import (
    Attach,
    AttentionMonitor,
    Checkpoint,
    MLflow,
    RollBack,
    Stop,
    Thresholds,
    Trackio,
    WeightsAndBiases,
)
from locater.monitor.alarms import BACK
from locater.monitor.report import LayerReport
from locater.monitor.trends import Trends
from locater.stabilisers import LocAteR, QKClip, QKNorm, SoftCap


def explode(model, factor=1e4):
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight *= factor


def train(model, monitor, optimizer, num_steps, at=None):
    """A loop of one's own; at one step the weights explode."""
    for step in range(num_steps):
        if step == at:
            explode(model)
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
        if monitor.should_stop:
            return step
    return num_steps


def setting(**options):
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, AttentionMonitor(model, every=1, optimizer=optimizer, **options)


def test_stop_ends_a_loop_and_a_function_sees_the_event():
    seen = []
    model, optimizer, monitor = setting(on_alarm=[Stop(), seen.append])
    assert train(model, monitor, optimizer, 6, at=3) == 3
    (event,) = seen
    assert event.model is model and {alarm.kind for alarm in event.report.alarms} >= {"logit explosion"}


def test_a_table_acts_on_one_kind_only():
    model, optimizer, monitor = setting(on_alarm={"rank collapse": Stop()})
    assert train(model, monitor, optimizer, 4, at=2) == 4
    for wrong, said in ((Stop, "class"), ("stop", "got 'stop'")):
        with pytest.raises(Refusal, match=f"an action such as Stop.*{said}"):
            AttentionMonitor(model, on_alarm=wrong)


def test_a_checkpoint_is_written_once(tmp_path):
    model, optimizer, monitor = setting(on_alarm=Checkpoint(tmp_path / "alarm-{step}.pt"))
    train(model, monitor, optimizer, 5, at=2)
    (path,) = tmp_path.iterdir()
    assert path.name == "alarm-2.pt" and set(torch.load(path)) == {"model", "optimizer"}


def test_roll_back_returns_to_the_last_good_state_at_a_lower_rate():
    model, optimizer, monitor = setting(on_alarm=RollBack(0.25, most=2, then=Stop()))
    train(model, monitor, optimizer, 2)
    good = copy.deepcopy(model.state_dict())  # the third report, without alarms, is of this state
    train(model, monitor, optimizer, 1)
    explode(model)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert monitor.step().alarms
    assert all(torch.equal(value, good[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 1e-3 and current_factor(optimizer) == 0.25, (
        "the schedule's own, between steps"
    )
    model(TOKENS)
    assert not monitor.step().alarms
    for _ in range(2):
        assert not monitor.should_stop
        explode(model)
        model(TOKENS)
        monitor.step()
    assert monitor.should_stop, "the third time is one too many"
    with pytest.raises(Refusal, match="an optimiser to roll back"):
        watch(model := llama(), lambda: model(TOKENS), on_alarm=RollBack())


@pytest.mark.parametrize("num_before", [0, 2])
def test_the_state_after_a_report_without_alarms_is_good_only_once_the_next_has_none(num_before):
    """A report is of the pass before the step: here that step breaks the weights."""
    model, optimizer, monitor = setting(on_alarm=RollBack(0.5))
    start = copy.deepcopy(model.state_dict())
    train(model, monitor, optimizer, num_before)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    explode(model)
    assert not monitor.step().alarms
    assert train(model, monitor, optimizer, 1) == 1
    model(TOKENS)
    assert not monitor.step().alarms, "back to a state from before the step that broke it"
    if not num_before:
        assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items()), "the start is good"


def test_heads_at_rest_do_not_keep_a_state_from_being_good():
    action = RollBack()
    at_rest = Thresholds(dead_uniform=0.0)
    model, optimizer, monitor = setting(on_alarm={"not finite": action}, thresholds=at_rest)
    train(model, monitor, optimizer, 2)
    good = copy.deepcopy(model.state_dict())
    train(model, monitor, optimizer, 2)
    assert any(not torch.equal(value, action.last["model"][name]) for name, value in good.items()), (
        "it went on from there"
    )


def test_attach_makes_a_stabiliser_that_the_monitor_steps():
    model, optimizer, monitor = setting(on_alarm=Attach(QKClip, threshold=20.0))
    train(model, monitor, optimizer, 6, at=2)
    model(TOKENS)
    report = monitor.step()
    assert report.training[1].mean("max_logit") < 25, "it was clipped"
    assert isinstance(monitor.stabilisers[0], QKClip)
    monitor.stabilisers[0].detach()


def test_attach_hands_on_the_optimiser_and_finds_the_heads_in_the_first_call():
    model = hand_written.decoder(hand_written.Fused).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sample = hand_written.TOKENS
    action = Attach(LocAteR, strength=1e-3)
    options = dict(every=1, optimizer=optimizer, thresholds=Thresholds(rank_collapse=2.0))
    with AttentionMonitor(model, on_alarm=action, **options) as monitor:
        model(sample).sum().backward()
        optimizer.step()
        monitor.step()
        assert isinstance(action.stabiliser, LocAteR) and action.stabiliser.optimizer is optimizer
        model(sample).sum().backward()
        monitor.step()
    action.stabiliser.detach()


def test_a_kind_of_alarm_that_does_not_exist_is_refused():
    with pytest.raises(Refusal, match="kinds of alarms .*logit explosion.* got 'logit explosions'"):
        AttentionMonitor(llama(), on_alarm={"logit explosions": Stop()})


def test_the_remedy_is_one_that_is_not_at_work():
    def advised(attach):
        model = llama()
        explode(model, 1e5)
        at_work = attach(model)
        report = watch(model, lambda: model(TOKENS))
        del at_work  # which must live as long as the report is made
        alarms = [alarm for alarm in report.alarms if alarm.kind == "logit explosion"]
        return alarms[0].remedy if alarms else None

    assert advised(lambda model: []) == advised(lambda model: [QKClip(model, threshold=1e9)]) == BACK
    order = ["RollBack", "QKNorm", "QKClip", "SoftCap", "a lower"]
    for number, remedy in enumerate(order):
        alarms = find_alarms([layer_at(1e3)], Thresholds(), attached=order[:number])
        assert alarms[0].remedy.startswith(remedy)


def test_a_norm_that_no_module_names_is_noticed_by_the_heads_found():
    model = hand_written.decoder(hand_written.NormedByHand).train()
    back = dict(on_alarm=RollBack(), optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
    report = watch(model, lambda: model(TOKENS % 40), thresholds=Thresholds(entropy_collapse=1.0), **back)
    remedies = {alarm.remedy for alarm in report.alarms if alarm.kind == "entropy collapse"}
    assert remedies == {"a longer warm-up"}, "QKNorm is there already"


def test_norms_and_caps_are_noticed_by_themselves():
    for attach, name in ((QKNorm, "QKNorm"), (lambda model: SoftCap(model, cap=30.0), "SoftCap")):
        model = llama()
        stabiliser = attach(model)
        with AttentionMonitor(model, every=1) as monitor:
            model(TOKENS)
            assert name in monitor._attached()
        stabiliser.detach()


def layer_at(largest):
    statistics = dict(max_logit=(largest, 1.0), normalised_entropy=(0.5, 0.5), sink_mass=(0.1, 0.1))
    return LayerReport("decoder", 1, (0, 1), statistics, {}, {}, 10, 1.0, 0, 0, 0, 1, math.log(100))


def test_growth_is_told_with_an_explosion_and_never_before():
    trends = Trends()
    for step, largest in ((0, 5.0), (100, 10.0), (200, 20.0)):
        trends.add(step, [layer_at(largest)])
        assert not find_alarms([layer_at(largest)], Thresholds(), trends=trends)
    kept = Trends()
    kept.load_state_dict(trends.state_dict())
    kept.add(300, [layer_at(80.0)])
    (alarm,) = find_alarms([layer_at(80.0)], Thresholds(), trends=kept)
    assert alarm.kind == "logit explosion" and "growing by +300% in 100 steps" in str(alarm)


def test_advice_is_what_this_layer_would_take():
    flex = replace(layer_at(1e3), through="flex_attention")
    back = ["RollBack"]
    assert find_alarms([flex], Thresholds(), attached=back)[0].remedy == "QKClip"
    assert find_alarms([flex], Thresholds(), attached=[*back, "QKClip"])[0].remedy == "a lower learning rate"
    flat = replace(layer_at(1.0), ranks={"residual": 0.01})
    assert "LocAteR" not in find_alarms([flat], Thresholds())[0].remedy


def adapted():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt2(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def with_our_norm(make=llama):
    QKNorm(model := make())
    return model


def latent():
    torch.manual_seed(0)
    small = dict(vocab_size=40, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2)
    sizes = dict(num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2)
    config = DeepseekV3Config(**small, **sizes, **experts, qk_nope_head_dim=8, v_head_dim=8)
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (llama, "QKNorm"),
        (lambda: hand_written.decoder(hand_written.Curved), "a lower learning rate"),  # no heads are found: all refuse
        (lambda: hand_written.decoder(hand_written.Normed), "SoftCap"),
        (with_our_norm, "SoftCap"),  # which undoes what QKClip does
        (latent, "QKNorm"),
        (lambda: with_our_norm(latent), "a lower learning rate"),  # SoftCap does not find its heads behind our norm
        (lambda: torch.compile(hand_written.decoder(hand_written.Fused), backend="eager"), "QKNorm"),
    ],
)
def test_nothing_is_advised_that_would_refuse_this_layer(make, remedy):
    model = make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with AttentionMonitor(
        model, every=1, thresholds=Thresholds(logit_explosion=1e-9), on_alarm=RollBack(), optimizer=optimizer
    ) as monitor:
        model(TOKENS % 40)
        report = monitor.step()
    assert {alarm.remedy for alarm in report.alarms if alarm.kind == "logit explosion"} == {remedy}


def test_under_autocast_what_stabilisers_find_is_advised():
    model = hand_written.decoder(hand_written.Fused).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    limits = Thresholds(logit_explosion=1e-9)
    with AttentionMonitor(model, every=1, thresholds=limits, on_alarm=RollBack(), optimizer=optimizer) as monitor:
        with torch.autocast("cpu", torch.bfloat16):
            model(TOKENS % 40)
        report = monitor.step()
        QKNorm(model, sample=TOKENS % 40).detach()
    assert {alarm.remedy for alarm in report.alarms if alarm.kind == "logit explosion"} == {"QKNorm"}


def test_a_weight_that_is_computed_is_not_to_be_clipped():
    model = adapted()
    monitor = AttentionMonitor(model)
    (unfit,) = {frozenset(monitor.seen.found.unfit(site)) for site in monitor.seen.sites}
    assert unfit == {"QKClip"}
    with pytest.raises(Refusal, match="computed weights"):
        QKClip(model)
    plain = AttentionMonitor(gpt2())
    assert not any(map(plain.seen.found.unfit, plain.seen.sites))


@pytest.mark.parametrize("make", [QKNorm, SoftCap, QKClip, lambda model, **at: LocAteR(model, strength=1e-3, **at)])
@pytest.mark.parametrize("sample", [{}, {"sample": hand_written.TOKENS}], ids=["first call", "sample"])
def test_passes_in_which_heads_are_found_are_not_the_trainings(make, sample):
    model = hand_written.decoder(hand_written.Fused).train()
    with AttentionMonitor(model, every=1) as monitor:
        model(hand_written.TOKENS)
        monitor.step()
        stabiliser = make(model, **sample)
        model(hand_written.TOKENS)
        report = monitor.step()
    stabiliser.detach()
    assert report.training and not report.evaluation and not report.no_grad


def test_numbers_of_the_weights_are_those_of_dense_matrices():
    model = gpt2()
    with AttentionMonitor(model, every=1) as monitor:
        before = dense(model)
        model(TOKENS)
        first = monitor.step().training[1]
        assert "update_ratio" not in first.weights
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        model(TOKENS)
        report = monitor.step()
    after, layer = dense(model), report.training[1]
    for head in range(4):
        w, update = after[head], after[head] - before[head]
        sigma, of_update = torch.linalg.svdvals(w), torch.linalg.svdvals(update)
        share = of_update.square() / of_update.square().sum()
        expected = {
            "sigma_1": sigma[0],
            "symmetry": (w @ w).trace() / w.square().sum(),
            "update_ratio": update.norm() / w.norm(),
            "update_stable_rank": of_update.square().sum() / of_update[0] ** 2,
            "update_entropy": torch.special.entr(share).sum() / math.log(16),
            "sigma_1_growth": math.log(sigma[0] / torch.linalg.svdvals(before[head])[0]),
        }
        for name, value in expected.items():
            assert layer.weights[name][head] == pytest.approx(float(value), rel=1e-4), name
    assert report.metrics()["attn/layer_01/sigma_1"] == pytest.approx(max(layer.weights["sigma_1"]))


def dense(model):
    """W of every head of the second layer, the norm's gain folded in, and centred as its output is."""
    block = model.transformer.h[1]
    weight = block.attn.c_attn.weight.detach().double() * block.ln_1.weight.detach().double()[:, None]
    weight = weight - weight.mean(0)
    query, key = (part.unflatten(1, (4, 8)) for part in weight.chunk(3, 1)[:2])
    return [key[:, head] @ query[:, head].mT for head in range(4)]


@pytest.mark.parametrize("make", [gpt2, llama])
def test_no_logit_exceeds_the_bound_of_the_weights(make):
    """With biases, without, with rotary positions; inputs along the worst direction come near to it."""
    model = make()
    layer = watch(model, lambda: model(TOKENS)).training[0]
    for largest, bound in zip(layer.statistics["max_logit"], layer.weights["logit_bound"], strict=True):
        assert largest <= bound < 1e3 * abs(largest)


def test_frames_and_the_worst_heads():
    model = llama()
    explode(model, 10.0)
    report = watch(model, lambda: model(TOKENS))
    frame = report.to_frame()
    assert len(frame) == 8 and {"layer", "head", "entropy", "sigma_1", "mode"} <= set(frame.columns)
    worst = report.worst(count=3)
    assert [row["layer"] for row in worst] == [1, 1, 1]
    assert worst[0]["max_logit"] == frame["max_logit"].max()
    assert report.worst("normalised_entropy", 1)[0]["normalised_entropy"] == frame["normalised_entropy"].min()


@pytest.mark.parametrize("sink", [WeightsAndBiases, Trackio])
def test_trackers_raise_an_alarm_once_for_as_long_as_it_lasts(sink):
    raised = []
    run = types.SimpleNamespace(log=lambda metrics: None, alert=lambda **given: raised.append(given["title"]))
    model = llama()
    with AttentionMonitor(model, every=1, sinks=[sink(run)]) as monitor:
        model(TOKENS)
        monitor.step()
        assert not raised
        explode(model)
        for _ in range(2):
            model(TOKENS)
            monitor.step()
    assert sorted(raised) == ["attention: entropy collapse", "attention: logit explosion"]


def test_mlflow_gets_metrics_a_tag_and_a_text():
    calls = []
    names = ("log_metrics", "set_tag", "log_text")
    run = types.SimpleNamespace(**{name: lambda *a, name=name, **k: calls.append((name, a, k)) for name in names})
    model = llama()
    explode(model)
    watch(model, lambda: model(TOKENS), sinks=[MLflow(run)])
    assert [name for name, *_ in calls] == list(names)
    assert calls[1][1] == ("attention.alarm", "step 0: logit explosion") and "try RollBack" in calls[2][1][0]


def trainer(folder, callback, **more):
    given = dict(per_device_train_batch_size=2, max_steps=6, logging_steps=50, report_to=[], use_cpu=True) | more
    arguments = TrainingArguments(output_dir=str(folder), disable_tqdm=True, save_strategy="no", **given)
    return Trainer(model=llama(), args=arguments, train_dataset=Texts(), callbacks=[callback])


def test_the_hugging_face_trainer_logs_prints_saves_and_stops(tmp_path, capsys):
    callback = AttentionCallback(
        every=2, thresholds=Thresholds(logit_explosion=1e-6), on_alarm={"logit explosion": [Checkpoint(), Stop()]}
    )
    run = trainer(tmp_path, callback)
    run.train()
    assert run.state.global_step == 1
    assert "step 0: logit explosion: decoder layer" in capsys.readouterr().out
    assert any("attn/layer_01/entropy" in entry for entry in run.state.log_history)
    assert (tmp_path / "checkpoint-1" / "attention_monitor.pt").exists()


def test_the_hugging_face_trainer_rolls_back(tmp_path):
    class ExplodeAt(AttentionCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                explode(kwargs["model"])

    callback = ExplodeAt(every=1, on_alarm=RollBack(0.5))
    run = trainer(tmp_path, callback, learning_rate=1e-4, lr_scheduler_type="constant")
    run.train()
    assert run.state.global_step == 6
    assert max(callback.report.training[1].statistics["max_logit"]) < 50, "back where it was"
    assert run.lr_scheduler.base_lrs == [1e-4, 1e-4] and callback.report.step == 5
