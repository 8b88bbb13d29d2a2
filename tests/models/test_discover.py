"""Heads found by one forward pass, against the softmax that the model itself computes."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import hand_written as own
from hand_written import HEADS, SIZE, TOKENS, WIDTH, decoder
from locater import Live, LocAteR, scan
from locater.errors import Refusal
from locater.models.live import open_live
from locater.scanning.source import heads
from locater.stabilisers import QKClip
from locater_lab.rivals import SpectralInitialisation
from written_models import Net, RotaryThenNorm

pytestmark = pytest.mark.quick

EXPLAINED = [
    own.Separate, own.Both, own.Grouped, own.Repeated, own.Rotary, own.Interleaved, own.Scaled, own.Normed,
    own.NormedByHand, own.Fused, own.PerHead, own.Backwards, own.Bare, own.Tied, own.Alibi, own.Window, own.Cross,
    own.TurnedThenNormed, own.Longer, own.Transposed,
]  # fmt: skip


WRITTEN_OUT = [own.WrittenOut, own.TokensFirst, own.CausalByHand, own.CappedByHand, own.SunkByHand]


@dataclass
class Seen:
    """What a kernel was given, and what the model's projections were."""

    probabilities: torch.Tensor
    query_input: torch.Tensor
    key_input: torch.Tensor


def materialised(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """softmax(q·k·scale + mask), as the documentation of the kernel defines it."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1) if enable_gqa else key
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.softmax(-1)


def measured(model, monkeypatch):
    """The probabilities of every call, and the inputs of every attention module."""
    kernel, seen = functional.scaled_dot_product_attention, []

    def record(*args, **kwargs):
        seen.append(materialised(*args, **kwargs))
        return kernel(*args, **kwargs)

    inputs = []
    for block in model.stack:
        block.mixer.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(functional, "scaled_dot_product_attention", record)
        model(TOKENS)
    return list(zip(seen, inputs, strict=True))


@pytest.mark.parametrize("attention", EXPLAINED, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_attention_from_the_heads_is_the_models_own(attention, norm, monkeypatch):
    model = decoder(attention, norm)
    found = list(open_live(model, sample=TOKENS).layers())
    assert len(found) == 2 and not any(layer.refused for layer in found)
    for layer, (probabilities, x) in zip(found, measured(model, monkeypatch), strict=True):
        x_key = x[:, :7].cos() if attention is own.Cross else x
        for head in layer.heads:
            ours = head.attention(x, x_key).detach()
            torch.testing.assert_close(ours, probabilities[:, head.index], atol=1e-5, rtol=0)
            assert isinstance(head.query.input_norm.gain, torch.Tensor)


@pytest.mark.parametrize("attention", WRITTEN_OUT)
def test_attention_that_is_written_out_is_the_models_own(attention):
    model = decoder(attention)
    found = list(open_live(model, sample=TOKENS).layers())
    inputs = []
    for block in model.stack:
        block.mixer.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with torch.no_grad():
        model(TOKENS)
    assert len(found) == 2 and not any(layer.refused for layer in found)
    for layer, block, x in zip(found, model.stack, inputs, strict=True):
        assert layer.heads[0].softcap == (2.0 if attention is own.CappedByHand else None)
        assert (layer.heads[0].sink is None) == (attention is not own.SunkByHand)
        for head in layer.heads:
            torch.testing.assert_close(
                head.attention(x, x).detach(), block.mixer.weights[:, head.index], atol=1e-5, rtol=0
            )


@pytest.mark.parametrize(
    ("attention", "block", "reach"),
    [
        (own.Separate, "decoder", (None, 0)),
        (own.Both, "encoder", (None, None)),
        (own.Window, "decoder", (3, 0)),
        (own.Cross, "cross", (None, None)),
    ],
)
def test_what_a_call_may_see(attention, block, reach):
    layer = next(open_live(decoder(attention), sample=TOKENS).layers())
    assert layer.block == block and (layer.heads[0].lookback, layer.heads[0].lookahead) == reach


def test_rotary_positions_are_those_of_the_model():
    head = next(open_live(decoder(own.Rotary), sample=TOKENS).layers()).heads[0]
    assert (head.rotary.base, head.rotary.num_dims, head.rotary.interleaved) == (10_000.0, SIZE, False)
    head = next(open_live(decoder(own.Interleaved), sample=TOKENS).layers()).heads[0]
    assert (head.rotary.base, head.rotary.num_dims, head.rotary.interleaved) == (500.0, 4, True)


def test_frequencies_of_no_known_law_are_measured():
    class Odd(own.Separate):
        frequencies = torch.tensor([0.9, 0.31, 0.3, 0.02])

        def between(self, q, k):
            angles = torch.arange(q.shape[-2])[:, None] * self.frequencies
            cosine, sine = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))
            return (x * cosine + torch.cat([-x[..., 4:], x[..., :4]], -1) * sine for x in (q, k))

    head = next(open_live(decoder(Odd), sample=TOKENS).layers()).heads[0]
    torch.testing.assert_close(head.rotary.frequencies(12).float(), Odd.frequencies, atol=1e-5, rtol=0)


def test_qk_norm_is_read_with_its_gain():
    head = next(open_live(decoder(own.NormedByHand), sample=TOKENS).layers()).heads[0]
    assert head.query.norm.kind == "rms" and head.query.norm.epsilon == 1e-5 and not head.turns_first
    assert next(open_live(decoder(own.TurnedThenNormed), sample=TOKENS).layers()).heads[0].turns_first


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (own.ConstantSink, "stack.0.mixer: expected a parameter of the attention with its sinks"),
        (own.FlatCap, "stack.0.mixer: expected a softmax of products of queries and keys, scaled or capped"),
        (own.BiasedLogits, "stack.0.mixer: expected a softmax of products of queries and keys, scaled or capped"),
        (own.Curved, "stack.0.mixer: expected queries that are rows of one product .* after `stack.0.mixer.q_proj`"),
    ],
)
def test_what_cannot_be_explained_is_refused_by_name(attention, message):
    for layer in open_live(decoder(attention), sample=TOKENS).layers():
        assert not layer.heads
    with pytest.raises(Refusal, match=message):
        scan(Live(decoder(attention), sample=TOKENS))


def test_a_float_mask_of_another_kind_is_refused():
    class Learned(own.Separate):
        def __init__(self):
            super().__init__()
            self.added = nn.Parameter(torch.randn(12, 12))

        def forward(self, x):
            q, k, v = own.heads(self.q_proj(x)), own.heads(self.k_proj(x)), own.heads(self.v_proj(x))
            return own.join(functional.scaled_dot_product_attention(q, k, v, attn_mask=self.added))

    (refused, *_), *_ = (layer.refused for layer in open_live(decoder(Learned), sample=TOKENS).layers())
    assert "fall with distance, as ALiBi's do, got another float mask" in refused


def test_a_bias_that_is_added_by_hand_is_not_lost():
    class Added(own.Bare):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x):
            q, k = own.heads(x @ self.w_query + self.shift), own.heads(x @ self.w_key)
            return own.join(functional.scaled_dot_product_attention(q, k, own.heads(x), is_causal=True))

    layer = next(open_live(decoder(Added), sample=TOKENS).layers())
    assert not layer.heads and "something else after" in layer.refused[0]


def test_the_pass_changes_nothing():
    model = decoder(own.Fused).train()
    model.stack[0].add_module("noise", nn.Dropout(0.5))
    before, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    list(open_live(model, sample=TOKENS).layers())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_heads_are_views_of_the_parameters():
    model = decoder(own.PerHead)
    heads = next(open_live(model, sample=TOKENS).layers()).heads
    assert heads[1].key.weight.data_ptr() == model.stack[0].mixer.qkv.weight[4 * SIZE].data_ptr()
    heads[1].key.weight.sum().backward()
    assert model.stack[0].mixer.qkv.weight.grad[4 * SIZE : 5 * SIZE].eq(1).all()


@pytest.mark.parametrize("sample", [{"tokens": TOKENS}, (TOKENS,), TOKENS[:1]], ids=["named", "several", "one text"])
def test_samples_as_models_take_them(sample):
    found = list(open_live(decoder(own.Normed), sample=sample).layers())
    assert [len(layer.heads) for layer in found] == [HEADS, HEADS]


def test_wrappers_are_taken_off():
    model = decoder(own.Fused)
    plain = [head.key.weight for layer in open_live(model, sample=TOKENS).layers() for head in layer.heads]
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        found = [head.key.weight for layer in open_live(wrapped, sample=TOKENS).layers() for head in layer.heads]
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("attention", [own.Separate, own.PerHead, own.Normed])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_part_of_the_weights(attention, dora, monkeypatch):
    peft = pytest.importorskip("peft")
    targets = ["qkv"] if attention is own.PerHead else ["q_proj", "k_proj"]
    model = peft.get_peft_model(decoder(attention), peft.LoraConfig(r=2, target_modules=targets, use_dora=dora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.2 * torch.rand_like(parameter))
    found = list(open_live(model, sample=TOKENS).layers())
    for layer, (probabilities, x) in zip(found, measured(model.get_base_model(), monkeypatch), strict=True):
        assert not layer.refused
        for head in layer.heads:
            ours = head.attention(x, x).detach()
            torch.testing.assert_close(ours, probabilities[:, head.index], atol=1e-5, rtol=0)
    found[0].heads[0].query.weight.sum().backward()
    assert any(p.grad is not None and p.grad.any() for n, p in model.named_parameters() if "lora_B" in n)


@pytest.mark.parametrize("attention", [own.Fused, own.PerHead, own.Backwards, own.Grouped, own.Bare])
def test_the_penalty_is_the_dense_sum(attention):
    model = decoder(attention)
    expected = 0.0
    for head in heads(Live(model, sample=TOKENS)):
        dense = head.key.weight.mT @ head.query.weight
        expected += ((dense @ dense).trace() + 2 * dense.square().sum()) / 3
    penalty = LocAteR(model, strength=0.5, sample=TOKENS).penalty()
    torch.testing.assert_close(penalty, 0.5 * expected)
    penalty.backward()
    parameters = dict(model.named_parameters())
    names = [name for name in parameters if any(word in name for word in ("qkv.w", "q_proj.w", "k_proj.w", "w_query"))]
    assert names and all(parameters[name].grad.any() for name in names)


def test_stabilisers_act_on_heads_that_were_found():
    model = decoder(own.PerHead)
    clip = QKClip(model, threshold=1e-3, sample=TOKENS)
    model(TOKENS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    clip.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all("qkv" in name for name in moved)
    SpectralInitialisation(model, xi=2.0, eta=1.5, sample=TOKENS)
    for row in scan(Live(model, sample=TOKENS), raw=True).heads:
        assert row.xi == pytest.approx(2.0, abs=1e-3) and row.eta == pytest.approx(1.5 * row.temperature, rel=1e-3)


class Constant(RotaryThenNorm):
    """As nanochat has it: a constant behind the norm of queries and keys, which turned before."""

    def make(self, x):
        q, k, v = super().make(x)
        return q * 1.2, k * 1.2, v


def test_a_constant_behind_a_norm_is_found():
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    model, inputs = Net(Constant).eval(), []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    rows = list(open_live(model, sample=tokens).layers())
    inputs.clear()
    with torch.no_grad():
        model(tokens)
    for layer, x, block in zip(rows, inputs, model.blocks, strict=True):
        for head in layer.heads:
            expected = block.attn.kept[:, head.index]
            seen = expected.isfinite()
            torch.testing.assert_close(head.logits(x, x)[seen].float(), expected[seen], rtol=1e-4, atol=1e-4)
