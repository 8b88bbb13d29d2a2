"""The monitor's behaviour: what it counts, what it leaves alone, what it costs."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from family_cases.base import shake
from locater.errors import Refusal
from locater.models.live import open_live
from locater.monitor import AttentionMonitor, Scope
from locater.monitor.alarms import Alarms

pytestmark = pytest.mark.quick

TOKENS = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))
SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=64)


def llama(**more):
    return shake(LlamaForCausalLM(LlamaConfig(**SIZES, **more)))


def gpt2(**more):
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64, **more)
    config.bos_token_id = config.eos_token_id = 0
    return shake(GPT2LMHeadModel(config))


def seen(report, *, evaluation=False):
    return {
        (layer.layer, name): values
        for layer in (report.evaluation if evaluation else report.training)
        for name, values in layer.statistics.items()
    }


def same(one, other, tolerance=1e-6):
    assert one.keys() == other.keys() and one
    for key, values in one.items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(other[key]), atol=tolerance, rtol=tolerance)


def watch(model, run, **options):
    with AttentionMonitor(model, every=1, **options) as monitor:
        run()
        return monitor.report()


def find_alarms(layers, thresholds, *, attached=(), trends=None):
    return Alarms(thresholds, trends).find({"training": layers}, lambda layer: attached)


def fingerprint(model):
    """Everything that hooks could leave behind."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
             "_forward_hooks_always_called", "_backward_hooks")  # fmt: skip
    return [
        (name, sorted(vars(module)), module.forward, *(len(getattr(module, kind)) for kind in hooks))
        for name, module in model.named_modules()
    ]


def test_attaching_and_detaching_leaves_no_trace():
    model = llama()
    before, state, random = fingerprint(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with AttentionMonitor(model, every=1, scope=Scope(budget=3000)) as monitor:
        assert fingerprint(model) != before
        model(TOKENS.repeat(1, 4))
        assert monitor.report().training[0].share_of_queries < 1, "it sampled, so it drew random numbers"
    assert fingerprint(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    monitor.detach()


def losses(model, monitor=None, *, num_steps=5):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(num_steps):
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if monitor:
            monitor.step()
    return found


def test_training_is_the_same_to_the_last_bit_and_every_counts_steps():
    model, reports = gpt2().train(), []
    watched = copy.deepcopy(model)
    expected = losses(model)

    class Keep:
        write, close = staticmethod(reports.append), staticmethod(lambda: None)

    with AttentionMonitor(watched, every=2, sinks=[Keep]) as monitor:
        assert losses(watched, monitor) == expected
    assert [report.step for report in reports] == [0, 2, 4]
    assert all(layer.num_passes == 1 for report in reports for layer in report.training)


def test_accumulated_batches_are_one_step_and_make_one_mean():
    model = llama()
    whole = watch(model, lambda: model(TOKENS))
    with AttentionMonitor(model, every=3) as monitor:
        for text in TOKENS:
            model(text[None])
        report = monitor.step()
        assert report is not None and report.training[0].num_passes == 2
        model(TOKENS)
        assert monitor.step() is None
    same(seen(report), seen(whole))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_count_once(reentrant):
    model = llama(use_cache=False).train()
    plain = watch(model, lambda: model(TOKENS, labels=TOKENS).loss.backward())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    calls = []
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    again = watch(model, lambda: model(TOKENS, labels=TOKENS).loss.backward())
    handle.remove()
    assert len(calls) == 2, "activations were computed again"
    assert [layer.num_passes for layer in again.training] == [1, 1]
    same(seen(again), seen(plain))


def test_training_and_evaluation_are_kept_apart():
    model = llama()
    with AttentionMonitor(model, every=1) as monitor:
        model.train()(TOKENS)
        model.eval()(TOKENS[:1])
        report = monitor.report()
        assert report.training[0].num_queries == 32 and report.evaluation[0].num_queries == 16
        assert {name.split("/")[0] for name in report.metrics()} == {"attn", "attn_eval"}
        assert monitor.report().notes[0].startswith("no forward pass was seen")


def test_chosen_layers_and_heads():
    model = llama()
    whole = watch(model, lambda: model(TOKENS))
    some = watch(model, lambda: model(TOKENS), scope=Scope(layers=[1], head_numbers=[3, 0, 9], per_head=True))
    (layer,) = some.training
    assert (layer.layer, layer.heads) == (1, (0, 3))
    expected = whole.training[1].statistics["entropy"]
    torch.testing.assert_close(layer.statistics["entropy"], (expected[0], expected[3]))
    assert some.metrics()["attn/layer_01/head_03/entropy"] == layer.statistics["entropy"][1]
    assert not any("head" in name for name in whole.metrics())
    with pytest.raises(Refusal, match="missing layers among 0-1 with the heads asked for"):
        AttentionMonitor(model, scope=Scope(layers=[7]))
    with pytest.raises(Refusal, match="of at least 1, got 0"):
        AttentionMonitor(model, every=0)


def test_the_largest_logit_is_that_of_the_heads():
    model = llama()
    seen_x = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen_x.update({name: args[0]}))
        for name, module in model.named_modules()
        if name.endswith("q_proj")
    ]
    report = watch(model, lambda: model(TOKENS))
    for handle in handles:
        handle.remove()
    for layer, mine in zip(open_live(model).layers(), report.training, strict=True):
        x = seen_x[layer.query_name]
        positions = torch.arange(16)
        for head in layer.heads:
            logits = head.logits(x, x).masked_fill(~head.admits(positions, positions), -torch.inf)
            assert abs(logits.max().item() - mine.statistics["max_logit"][head.index]) < 1e-4


def test_the_budget_thins_and_says_so():
    model = llama()
    tokens = torch.randint(0, 50, (2, 64), generator=torch.Generator().manual_seed(2))
    whole = watch(model, lambda: model(tokens))
    assert not whole.notes
    with AttentionMonitor(model, every=1, scope=Scope(budget=2 * 2 * 4 * 32 * 40)) as monitor:
        for _ in range(8):
            model(tokens)
        thin = monitor.report()
    (layer, _) = thin.training
    assert layer.num_queries < 8 * 128 and 0 < layer.share_of_queries < 0.7
    assert "to keep within the budget" in thin.notes[0] and "the budget was spent" in thin.notes[1]
    for mine, theirs in zip(thin.training, whole.training, strict=True):
        for name, errors in mine.standard_errors.items():
            for head, error in enumerate(errors):
                assert error > 0
                assert abs(mine.statistics[name][head] - theirs.statistics[name][head]) < 5 * error, name
    assert all(error == 0 for error in whole.training[0].standard_errors["entropy"])


def test_weights_that_are_not_finite_are_noted_and_do_not_stop_the_run():
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    report = watch(model, lambda: model(TOKENS))
    one, other = report.training
    assert one.rows_not_finite == 0 and other.rows_not_finite == TOKENS.numel()
    assert [alarm.layer for alarm in report.alarms if alarm.kind == "not finite"] == [1]


def test_state_is_kept():
    model = llama()
    with AttentionMonitor(model, every=4) as monitor:
        for _ in range(6):
            monitor.step()
        state = monitor.state_dict()
    resumed = AttentionMonitor(model, every=4)
    resumed.load_state_dict(state)
    assert resumed.num_steps == 6 and not resumed.is_due()


def test_a_monitor_that_was_detached_says_so():
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    monitor = AttentionMonitor(model, every=1)
    monitor.detach()
    with pytest.raises(Refusal, match="expected an attached monitor.*attach"):
        monitor.step()


def test_passes_without_gradients_are_apart_from_those_that_train():
    """Old policies in between change nothing of the training numbers; recomputation is no second pass."""
    model = llama()
    alone = watch(model, lambda: model(TOKENS))

    def both():
        with torch.no_grad():
            model(TOKENS[:, :3])
        model(TOKENS).logits.sum().backward()
        model.zero_grad()

    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        report = watch(model, both)
        same(seen(report), seen(alone), 1e-6)
        assert [layer.num_passes for layer in report.training] == [layer.num_passes for layer in report.no_grad]
        assert report.no_grad[0].num_queries == TOKENS[:, :3].numel()
        assert {name.split("/")[0] for name in report.metrics()} == {"attn", "attn_no_grad"}
        assert {row["mode"] for row in report._rows()} == {"training", "no_grad"} and not report.evaluation
