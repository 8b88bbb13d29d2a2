"""The small transformer against Hugging Face's GPT-2, torch's own layers, and the family table that reads it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import locater_lab.train.model as model_module
from family_cases.base import shake
from locater.errors import Refusal
from locater.models import live as modules
from locater.scanning.scan import scan
from locater.stabilisers import Constant, LocAteR, Projected
from locater_lab.train.model import LanguageModel, linear_cross_entropy
from locater_lab.train.shape import SHAPES, Shape

pytestmark = pytest.mark.quick

SMALL = Shape(vocab_size=50, context=12, num_layers=2, num_heads=4, d_model=32, d_feedforward=48)
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 50


def split(linear_in_out, parts=3):
    """A projection stored (in, out), as transformers' Conv1D has it, cut into (out, in) parts."""
    return zip(linear_in_out.weight.T.chunk(parts), linear_in_out.bias.chunk(parts), strict=True)


def put(linear, weight, bias):
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


@torch.no_grad()
def like_gpt2(theirs: GPT2LMHeadModel, ours: LanguageModel) -> None:
    source = theirs.transformer
    ours.embedding.weight.copy_(source.wte.weight)
    ours.position.weight.copy_(source.wpe.weight)
    ours.norm.load_state_dict(source.ln_f.state_dict())
    for block, layer in zip(source.h, ours.layers, strict=True):
        for name, (weight, bias) in zip(("query", "key", "value"), split(block.attn.c_attn), strict=True):
            put(getattr(layer.attention, name), weight, bias)
        put(layer.attention.output, *next(split(block.attn.c_proj, 1)))
        put(layer.feedforward.inner, *next(split(block.mlp.c_fc, 1)))
        put(layer.feedforward.outer, *next(split(block.mlp.c_proj, 1)))
        layer.attention_norm.load_state_dict(block.ln_1.state_dict())
        layer.feedforward_norm.load_state_dict(block.ln_2.state_dict())


@torch.no_grad()
def like_encoder_layer(theirs: nn.TransformerEncoderLayer, layer) -> None:
    attention = theirs.self_attn
    projections = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    for name, (weight, bias) in zip(("query", "key", "value"), projections, strict=True):
        put(getattr(layer.attention, name), weight, bias)
    put(layer.attention.output, attention.out_proj.weight, attention.out_proj.bias)
    put(layer.feedforward.inner, theirs.linear1.weight, theirs.linear1.bias)
    put(layer.feedforward.outer, theirs.linear2.weight, theirs.linear2.bias)
    layer.attention_norm.load_state_dict(theirs.norm1.state_dict())
    layer.feedforward_norm.load_state_dict(theirs.norm2.state_dict())


def test_equals_hugging_face_gpt2():
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=12, vocab_size=50)
    theirs = shake(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))).eval()
    chosen = {name: getattr(SHAPES["gpt2"], name) for name in ("norm_first", "positions", "activation")}
    ours = LanguageModel(replace(SMALL, **chosen, scaled_embedding=False)).eval()
    like_gpt2(theirs, ours)
    with torch.no_grad():
        expected, found = theirs(TOKENS).logits, ours(TOKENS)
    assert expected.std() > 1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_equals_torchs_encoder_layer(norm_first):
    options = dict(dim_feedforward=48, dropout=0.0, batch_first=True, norm_first=norm_first)
    theirs = shake(nn.TransformerEncoderLayer(32, 4, **options)).eval()
    ours = LanguageModel(replace(SMALL, norm_first=norm_first)).eval()
    like_encoder_layer(theirs, ours.layers[0])
    x = torch.randn(2, 12, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    with torch.no_grad():
        expected = theirs(x, src_mask=mask, is_causal=True)
        torch.testing.assert_close(ours.layers[0](x), expected, atol=1e-5, rtol=1e-5)


def test_presets_have_the_sizes_of_the_paper_and_of_gpt2():
    paper = replace(SHAPES["paper"], vocab_size=33_278)
    assert (paper.num_layers, paper.num_heads, paper.d_model, paper.d_feedforward) == (1, 1, 128, 128)
    assert not paper.norm_first
    with torch.device("meta"):
        gpt2 = LanguageModel(SHAPES["gpt2"])
    assert sum(parameter.numel() for parameter in gpt2.parameters()) == 124_439_808  # as published


def test_the_gain_is_xaviers_and_moves_nothing_else():
    """Against torch's own initialisation with that gain, drawn from the same seed."""
    gain = 0.7071
    torch.manual_seed(3)
    plain = LanguageModel(replace(SMALL, scaled_embedding=True))
    torch.manual_seed(3)
    scaled = LanguageModel(replace(SMALL, scaled_embedding=True, qkv_gain=gain))
    before, after = dict(plain.named_parameters()), dict(scaled.named_parameters())
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved == {f"layers.{n}.attention.{side}.weight" for n in range(2) for side in ("query", "key", "value")}
    wide = torch.empty(400, 400)
    nn.init.xavier_uniform_(wide, gain=gain)
    ours = LanguageModel(Shape(vocab_size=3, d_model=400, qkv_gain=gain)).layers[0].attention
    for side in (ours.query, ours.key, ours.value):
        torch.testing.assert_close(side.weight.std(), wide.std(), rtol=0.02, atol=0)
        torch.testing.assert_close(side.weight.abs().max(), wide.abs().max(), rtol=0.001, atol=0)


def test_attention_has_a_dropout_of_its_own(monkeypatch):
    shares = []
    kernel = functional.scaled_dot_product_attention

    def spy(*arguments, dropout_p, **options):
        shares.append(dropout_p)
        return kernel(*arguments, dropout_p=dropout_p, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    for options in ({}, {"attention_dropout": 0.0}, {"attention_dropout": 0.3}):
        LanguageModel(replace(SMALL, num_layers=1, dropout=0.1, **options)).train()(TOKENS)
    assert shares == [0.1, 0.0, 0.3]


@pytest.mark.parametrize("options", [{"attention_dropout": 1.0}, {"qkv_gain": 0.0}, {"qkv_gain": math.inf}])
def test_impossible_starts_are_refused(options):
    with pytest.raises(ValueError, match="gain"):
        replace(SMALL, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cross_entropy_in_pieces_is_cross_entropy(dtype, monkeypatch):
    monkeypatch.setattr(model_module, "TOKENS_AT_ONCE", 64)
    x, weight = (torch.randn(rows, 8, dtype=dtype, requires_grad=True) for rows in (150, 40))
    targets = torch.randint(40, (150,))
    expected = functional.cross_entropy(x @ weight.T, targets)
    found = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(3 * found, (x, weight)), torch.autograd.grad(3 * expected, (x, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(x, weight, targets), expected)


def test_cross_entropy_under_autocast_multiplies_in_bfloat16(monkeypatch):
    monkeypatch.setattr(model_module, "TOKENS_AT_ONCE", 64)
    x, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (150, 40))
    targets = torch.randint(40, (150,))
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(x, weight, targets)
        reference = functional.cross_entropy(functional.linear(x, weight).float(), targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference, rtol=1e-5, atol=1e-5)
    exact = functional.cross_entropy(functional.linear(x, weight), targets)
    assert abs(float((found - exact).detach())) > 1e-5  # it was not multiplied in float32
    for ours, theirs in zip(
        torch.autograd.grad(found, (x, weight)), torch.autograd.grad(exact, (x, weight)), strict=True
    ):
        assert ours.dtype == torch.float32 and (ours - theirs).abs().max() < 0.02 * theirs.abs().max()


VARIANTS = {
    "post-LN": SMALL,
    "pre-LN": replace(SMALL, norm_first=True, positions="learned"),
    "rotary, grouped, RMS": replace(SMALL, norm_first=True, positions="rotary", num_key_heads=2, norm="rms"),
    "rotary, post-LN, no bias": replace(SMALL, positions="rotary", bias=False, rotary_base=500.0),
}


@pytest.mark.parametrize("shape", VARIANTS.values(), ids=VARIANTS)
def test_the_family_table_reads_the_attention_that_the_model_computes(shape):
    """The heads' own softmax, on the input that each layer saw, gives what the layer's values mix to."""
    model, seen = shake(LanguageModel(shape)).eval(), []
    for layer in model.layers:
        layer.attention.register_forward_hook(lambda module, args, output: seen.append((module, args[0], output)))
    with torch.no_grad():
        model(TOKENS)
    found = list(modules.open_live(model).layers())
    assert [len(layer.heads) for layer in found] == [4, 4]
    for layer, (attention, x, output) in zip(found, seen, strict=True):
        value = attention.value(x).unflatten(-1, (shape.key_heads, -1))
        mixed = [head.attention(x, x) @ value[:, :, head.key_index] for head in layer.heads]
        with torch.no_grad():
            torch.testing.assert_close(attention.output(torch.cat(mixed, -1)), output, atol=1e-5, rtol=1e-5)
        norm = layer.heads[0].query.input_norm
        assert (norm is None) == (layer.number == 0 and not shape.norm_first)
        if norm is not None:
            plain = (x if norm.bias is None else x - norm.bias) / norm.gain
            torch.testing.assert_close(plain.square().mean(-1), torch.ones(2, 12), atol=2e-3, rtol=0)


def test_a_later_token_changes_nothing_before_it():
    model = shake(LanguageModel(VARIANTS["rotary, grouped, RMS"])).eval()
    other = TOKENS.clone()
    other[:, -1] += 1
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS)[:, :-1], model(other % 50)[:, :-1])


def test_stabilisers_hold_its_heads():
    model = LanguageModel(SMALL)
    locater = LocAteR(model, strength=1e-3, mean=Projected(Constant(0.5)))
    locater.penalty().backward()
    locater.step()
    rows = scan(model, raw=True).heads
    assert len(rows) == 8
    for row in rows:
        assert row.trace / row.temperature == pytest.approx(0.5, abs=1e-4)


def test_what_cannot_be_a_model_is_refused():
    with pytest.raises(Refusal, match="multiple of the heads"):
        Shape(d_model=10, num_heads=3)
    with pytest.raises(Refusal, match="an even width for rotary"):
        Shape(d_model=6, num_heads=2, positions="rotary")
    with pytest.raises(Refusal, match="num_layers of at least 1"):
        Shape(num_layers=0)
    with pytest.raises(Refusal, match="a dropout in"):
        Shape(dropout=1.0)
    with pytest.raises(Refusal, match="a vocabulary"):
        LanguageModel(Shape())
    with pytest.raises(Refusal, match="at most 12 tokens"):
        LanguageModel(SMALL)(torch.zeros(1, 13, dtype=torch.long))
