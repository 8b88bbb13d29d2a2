"""The monitor on all kinds of inputs and models: masks, positions, kernels, precisions."""

import copy

import pytest
import torch
from test_monitor import SIZES, TOKENS, llama, same, seen, watch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from family_cases.base import shake
from locater import Live
from locater.attention import observe
from locater.errors import Refusal
from locater.models.live import open_live
from locater.monitor import AttentionMonitor


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_left_out_and_counted(left):
    model = llama().eval()
    tokens, mask = TOKENS.clone(), torch.ones_like(TOKENS)
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
    packed = watch(model, lambda: model(torch.cat(parts, 1), position_ids=positions, use_cache=False))
    joined = watch(model, lambda: model(torch.cat(parts, 1), position_ids=positions, use_cache=True))
    assert joined.evaluation[0].rows_with_one_key == 1, "with a cache the model itself does not part them"
    assert packed.evaluation[0].rows_with_one_key == 2
    alone = [watch(model, lambda text=text: model(text)).evaluation[1] for text in parts]
    for name in ("entropy", "near_mass", "sink_mass", "mean_distance"):
        expected = sum(n * torch.tensor(found.statistics[name]) for n, found in zip((6, 10), alone, strict=True)) / 16
        torch.testing.assert_close(
            torch.tensor(packed.evaluation[1].statistics[name]), expected, atol=1e-5, rtol=0, msg=name
        )


def test_generation_with_cached_keys_is_one_pass_over_all_tokens():
    """Query by query with cached keys, against one pass over prompt and answer: the same queries, keys and places."""
    model = llama().eval()
    with AttentionMonitor(model, every=1) as monitor, torch.no_grad():
        tokens = model.generate(TOKENS[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
        cached = monitor.report()
        model(tokens[:, :-1])
        whole = monitor.report()
    assert cached.evaluation[0].num_queries == whole.evaluation[0].num_queries == tokens.shape[1] - 1
    same(seen(cached, evaluation=True), seen(whole, evaluation=True), 1e-5)


def test_a_block_mask_is_obeyed():
    """FlexAttention's masks are rules; the kernel itself is not needed to read one."""
    from torch.nn.attention.flex_attention import create_block_mask

    from locater.monitor.inputs import ModuleInputs, read_padding

    x = torch.randn(2, 16, 32)
    documents = torch.arange(16) // 5

    def rule(batch, head, query, key):
        return (documents[query] == documents[key]) & (query >= key) & ((head + batch) % 2 <= query)

    block_mask = create_block_mask(rule, 2, 4, 16, 16, device="cpu")
    call = ModuleInputs({"attention_mask": block_mask}, x_query=x, x_key=x)
    mask, positions = read_padding(call, {}, "decoder", (0, 3), is_causal=True)
    assert positions is None
    found = observe([next(open_live(llama()).layers()).heads[i] for i in (0, 3)], x, x, mask=mask)
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
    x = torch.randn(2, 5, 16)
    with pytest.raises(Refusal, match=r"neither in Sequential; name its projections by Live\(model, heads="):
        watch(model, lambda: model(x))
    named = [("1.q", "1.k", 4, 2)]
    report = watch(Live(model, heads=named), lambda: model(x))
    assert not report.training and "`1.q`) calls no attention kernel" in report.notes[0]
    report = watch(Live(model, heads=named, causal=True), lambda: model(x))
    assert report.training[0].num_queries == 10 and len(report.training[0].heads) == 4
    assert report.training[0].through == "module inputs" and "reconstructed" in report.notes[0]
    q, k = (part(model[0](x)).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (model[1].q, model[1].k))
    logits = (q @ k.repeat_interleave(2, 1).mT / 2).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.tensor(report.training[0].statistics["entropy"]), entropy, atol=1e-5, rtol=0)


def test_sliding_windows_and_rank_measures_are_reported():
    model = shake(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))).eval()
    report = watch(model, lambda: model(TOKENS))
    layer = report.evaluation[0]
    assert max(layer.statistics["participation"]) <= 4 and max(layer.statistics["mean_distance"]) <= 3
    assert set(layer.ranks) == {"residual", "mean_cosine", "stable_rank", "effective_rank"}
    assert 1 <= layer.ranks["stable_rank"] <= layer.ranks["effective_rank"] + 16
    assert report.metrics()["attn_eval/layer_00/effective_rank"] == layer.ranks["effective_rank"]


@pytest.mark.slow
def test_flex_attention_is_watched_with_its_own_masks():
    """The kernel itself, compiled for the CPU, gets a block mask; sdpa on the same weights gets a dense one."""
    model = llama().eval()
    padding = torch.ones_like(TOKENS)
    padding[1, -4:] = 0
    for mask in (None, padding):
        model.set_attn_implementation("sdpa")
        expected = watch(model, lambda mask=mask: model(TOKENS, attention_mask=mask))
        model.set_attn_implementation("flex_attention")
        with torch.no_grad():
            found = watch(model, lambda mask=mask: model(TOKENS, attention_mask=mask))
        same(seen(found, evaluation=True), seen(expected, evaluation=True), 1e-5)


def test_a_layout_describes_a_model_that_calls_no_kernel(tmp_path):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk = nn.Linear(12, 8), nn.Linear(12, 8)

        def probabilities(self, x):
            q, k = (side(x).unflatten(-1, (2, 4)).transpose(1, 2) for side in (self.wq, self.wk))
            weights = (q @ k.mT / 2).exp().tril()
            return weights / weights.sum(-1, keepdim=True)

        def forward(self, x):
            return x + (self.probabilities(x) @ x.unflatten(-1, (2, 6)).transpose(1, 2)).transpose(1, 2).flatten(2)

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x):
            return self.stack[1](self.stack[0](x))

    layout, model, x = tmp_path / "layout.yaml", Stack(), torch.randn(2, 7, 12)
    names = "query: 'stack.{layer}.wq', key: 'stack.{layer}.wk'"
    row = f"{{block: decoder, {names}, layers: 2, heads: 2, d_head: 4, lookahead: 0}}"
    layout.write_text(f"attention: [{row}]")
    report = watch(Live(model, layout=layout), lambda: model(x))
    for layer, module, given in zip(report.training, model.stack, (x, model.stack[0](x)), strict=True):
        expected = torch.special.entr(module.probabilities(given)).sum(-1).mean((0, 2))
        assert layer.through == "module inputs"
        torch.testing.assert_close(torch.tensor(layer.statistics["entropy"]), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(Refusal, match="neither in Stack; name its projections by Live"):
        watch(model, lambda: model(x))


def test_packed_documents_are_no_reason_to_doubt_the_heads():
    """Their positions begin anew, and no logit is that of a text whose tokens are numbered through."""
    model = llama().train()
    tokens = torch.randint(0, 50, (2, 60), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(n) for n in (25, 35)])[None].expand(2, -1)
    with AttentionMonitor(model, every=1) as monitor:
        model(input_ids=tokens, position_ids=positions)
        report = monitor.step()
    assert report.notes == () and all(bound > 0 for layer in report.training for bound in layer.weights["logit_bound"])
