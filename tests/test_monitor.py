"""The monitor's behaviour: what it counts, what it leaves alone, what it costs."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from family_cases.base import shake
from locater.attention import observe
from locater.errors import Refusal
from locater.modules import layers
from locater.monitor import AttentionMonitor

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
    with AttentionMonitor(model, every=1, budget=3000) as monitor:
        assert fingerprint(model) != before
        model(TOKENS)
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
    some = watch(model, lambda: model(TOKENS), layers=[1], heads=[3, 0, 9], per_head=True)
    (layer,) = some.training
    assert (layer.layer, layer.heads) == (1, (0, 3))
    expected = whole.training[1].statistics["entropy"]
    torch.testing.assert_close(layer.statistics["entropy"], (expected[0], expected[3]))
    assert some.metrics()["attn/layer_01/head_03/entropy"] == layer.statistics["entropy"][1]
    assert not any("head" in name for name in whole.metrics())
    with pytest.raises(Refusal, match="layers among 0-1 with the heads asked for, got none"):
        AttentionMonitor(model, layers=[7])
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
    for layer, mine in zip(layers(model), report.training, strict=True):
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
    with AttentionMonitor(model, every=1, budget=2 * 2 * 4 * 32 * 40) as monitor:
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


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_left_out_and_counted(left):
    model = llama().eval()
    tokens, mask = TOKENS.clone(), torch.ones_like(TOKENS)
    mask[1, : 5 if left else 16] = 0
    mask[1, 5:11] = 1
    mask[1] = torch.tensor([0] * 5 + [1] * 11 if left else [1] * 11 + [0] * 5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    report = watch(model, lambda: model(tokens, attention_mask=mask, position_ids=positions))
    (layer, _) = report.evaluation
    assert layer.rows_without_keys == 5 and layer.rows_with_one_key == 2
    alone = [watch(model, lambda text=text: model(text)) for text in (tokens[:1], tokens[1:, mask[1].bool()])]
    for name in ("entropy", "sink_mass", "mean_distance"):
        parts = [torch.tensor(found.evaluation[0].statistics[name]) for found in alone]
        expected = (16 * parts[0] + 11 * parts[1]) / 27
        torch.testing.assert_close(torch.tensor(layer.statistics[name]), expected, atol=1e-5, rtol=0)


def test_packed_documents_are_seen_apart():
    model = llama(attn_implementation="sdpa").eval()
    parts = TOKENS[:1, :6], TOKENS[1:, :10]
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    packed = watch(model, lambda: model(torch.cat(parts, 1), position_ids=positions))
    alone = [watch(model, lambda text=text: model(text)).evaluation[1] for text in parts]
    for name in ("entropy", "near_mass", "sink_mass", "mean_distance"):
        expected = sum(n * torch.tensor(found.statistics[name]) for n, found in zip((6, 10), alone, strict=True)) / 16
        torch.testing.assert_close(
            torch.tensor(packed.evaluation[1].statistics[name]), expected, atol=1e-5, rtol=0, msg=name
        )


def test_generation_with_cached_keys_is_said_and_not_misread():
    model = llama().eval()
    with AttentionMonitor(model, every=1) as monitor, torch.no_grad():
        model.generate(TOKENS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
        report = monitor.report()
    assert report.evaluation[0].num_queries == 16, "the prompt only"
    assert report.notes == ("6 calls with cached keys were not looked at: their inputs are gone",)


def test_a_block_mask_is_obeyed():
    """FlexAttention's masks are rules; the kernel itself is not needed to read one."""
    from torch.nn.attention.flex_attention import create_block_mask

    from locater.monitor.calls import Call, read_mask

    x = torch.randn(2, 16, 32)
    documents = torch.arange(16) // 5

    def rule(batch, head, query, key):
        return (documents[query] == documents[key]) & (query >= key) & ((head + batch) % 2 <= query)

    block_mask = create_block_mask(rule, 2, 4, 16, 16, device="cpu")
    call = Call({"attention_mask": block_mask}, x_query=x, x_key=x)
    mask, positions = read_mask(call, {}, "decoder", (0, 3), is_causal=True)
    assert positions is None
    found = observe([next(layers(llama())).heads[i] for i in (0, 3)], x, x, mask=mask)
    expected = [[[sum(bool(rule(b, h, q, k)) for k in range(16)) for q in range(16)] for h in (0, 3)] for b in (0, 1)]
    assert found.num_keys.tolist() == expected


def test_compiled_models_are_watched():
    model = llama().eval()
    plain = watch(model, lambda: model(TOKENS))
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    with AttentionMonitor(compiled, every=2) as monitor, torch.no_grad():
        compiled(TOKENS)
        first = monitor.step()
        compiled(TOKENS)
        assert monitor.step() is None
        compiled(TOKENS)
        third = monitor.step()
    torch.compiler.reset()
    for report in (first, third):
        assert report.evaluation[0].num_passes == 1
        same(seen(report, evaluation=True), seen(plain, evaluation=True), 1e-5)


def test_half_precision_and_autocast():
    model = llama().eval()
    exact = watch(model, lambda: model(TOKENS))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = watch(model, lambda: model(TOKENS))
    half = copy.deepcopy(model).bfloat16()
    low = watch(half, lambda: half(TOKENS))
    for report in (mixed, low):
        for name in ("normalised_entropy", "near_mass", "sink_mass"):
            ours, theirs = (torch.tensor(r.evaluation[0].statistics[name]) for r in (report, exact))
            torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)


def test_weights_that_are_not_finite_are_noted_and_do_not_stop_the_run():
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    report = watch(model, lambda: model(TOKENS))
    assert [layer.layer for layer in report.training] == [0]
    assert any("decoder layer 1, head 0: expected finite weights" in note for note in report.notes)


def test_torchs_own_layers_with_both_kinds_of_mask():
    """`nn.TransformerEncoder`: padding and a causal mask, given the other way round, texts first or second."""
    for batch_first in (True, False):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first, dropout=0.0)
        model = shake(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).eval()
        x = torch.randn(2, 9, 16)
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[1, 6:] = True
        causal = nn.Transformer.generate_square_subsequent_mask(9)
        weights = []
        own = model.layers[0].self_attn.forward
        model.layers[0].self_attn.forward = lambda *args, own=own, weights=weights, **kwargs: (
            weights.append(own(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})[1]),
            own(*args, **kwargs),
        )[1]
        given = x if batch_first else x.transpose(0, 1)
        with AttentionMonitor(model, every=1) as monitor, torch.no_grad():
            model(given, mask=causal, src_key_padding_mask=padding.float().masked_fill(padding, -torch.inf))
            report = monitor.report()
        entropy = torch.special.entr(weights[0].double()).sum(-1).mean((0, 2))
        torch.testing.assert_close(
            torch.tensor(report.evaluation[0].statistics["entropy"], dtype=torch.float64), entropy, atol=1e-5, rtol=0
        )


def test_projections_that_the_user_names():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.q(x) + self.k(x).repeat(1, 1, 2)

    model = nn.Sequential(nn.Linear(16, 16), Own())
    with pytest.raises(Refusal, match="name the projections"):
        AttentionMonitor(model)
    report = watch(model, lambda: model(torch.randn(2, 5, 16)), attention=[("1.q", "1.k", 4, 2)])
    assert report.training[0].num_queries == 10 and len(report.training[0].heads) == 4


def test_state_is_kept():
    model = llama()
    with AttentionMonitor(model, every=4) as monitor:
        for _ in range(6):
            monitor.step()
        state = monitor.state_dict()
    resumed = AttentionMonitor(model, every=4)
    resumed.load_state_dict(state)
    assert resumed.num_steps == 6 and not resumed.is_due()


def test_sliding_windows_and_rank_measures_are_reported():
    model = shake(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))).eval()
    report = watch(model, lambda: model(TOKENS))
    layer = report.evaluation[0]
    assert max(layer.statistics["participation"]) <= 4 and max(layer.statistics["mean_distance"]) <= 3
    assert set(layer.ranks) == {"residual", "mean_cosine", "stable_rank", "effective_rank"}
    assert 1 <= layer.ranks["stable_rank"] <= layer.ranks["effective_rank"] + 16
    assert report.metrics()["attn_eval/layer_00/effective_rank"] == layer.ranks["effective_rank"]
