"""What the families after Llama say beyond one forward pass: older spellings, eight-bit weights, refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from family_cases.latent import LATENT
from family_cases.llama import FOUR, LONG, SHORT, case
from locater import checkpoints
from locater.errors import Refusal
from locater.models import Config, open_model
from locater.models.config import resolve
from locater.models.rope import rotary_of
from locater.models.tables.llama import GEMMA3, LLAMA, MISTRAL, PHI3, QWEN2, SMOLLM3

pytestmark = pytest.mark.quick

STRETCHED = dict(short_factor=SHORT, long_factor=LONG)


def rotary(row, **values):
    return rotary_of(row.rotary, Config(values), layer=0, d_head=12)


def heads_of(directory):
    with checkpoints.open(directory) as checkpoint:
        return [head for layer in open_model(Config(checkpoint.config), checkpoint).layers() for head in layer.heads]


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_early_names_of_longrope(kind):
    sizes = dict(max_position_embeddings=64, original_max_position_embeddings=8, rope_theta=300)
    today = rotary(PHI3, rope_scaling=STRETCHED | dict(type="longrope"), **sizes)
    assert rotary(PHI3, rope_scaling=STRETCHED | dict(type=kind), **sizes) == today
    assert today.scaling.long_factors == tuple(LONG)


def test_whole_numbers_are_numbers():
    scaling = dict(rope_type="yarn", factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=16)
    assert rotary(LLAMA, rope_scaling=scaling, rope_theta=10_000).scaling.factor == 4.0


def test_early_stablelm_names(tmp_path):
    tiny = case("", "StableLm", settings=FOUR | dict(partial_rotary_factor=0.5, rope_theta=300.0, layer_norm_eps=1e-3))
    tiny.save(tiny.build(), tmp_path)
    today = heads_of(tmp_path)
    early = FOUR | dict(model_type="stablelm_epoch", rope_pct=0.5, rope_theta=300, norm_eps=1e-3)
    (tmp_path / "config.json").write_text(json.dumps(early))
    x = torch.randn(5, 48)
    for new, old in zip(today, heads_of(tmp_path), strict=True):
        assert old.rotary.num_dims == 6 and old.query.input_norm.epsilon == 1e-3
        assert torch.equal(new.logits(x, x), old.logits(x, x))


@pytest.mark.parametrize(
    "scaling, match",
    [
        (dict(type="linear", factor=0), "positive number for `factor`"),
        (dict(type="linear", factor="2"), "positive number for `factor`"),
        (dict(type="linear"), "`factor` in the config"),
        (dict(type="spiral"), "known kind of rotary scaling"),
        (dict(full_attention=dict(rope_theta=3.0)), "one table"),
        ([1, 2], "one table"),
    ],
)
def test_rotary_parameters_that_cannot_be(scaling, match):
    with pytest.raises(Refusal, match=match):
        rotary(LLAMA, rope_scaling=scaling, max_position_embeddings=64)


@pytest.mark.parametrize(
    "row, values, expected",
    [
        (MISTRAL, {}, 4095),  # what the family's config class says where a file says nothing
        (MISTRAL, dict(sliding_window=None), None),
        (QWEN2, dict(sliding_window=9), None),
        (QWEN2, dict(sliding_window=9, use_sliding_window=True), None),  # only from layer 28 on
        (QWEN2, dict(sliding_window=9, use_sliding_window=True, max_window_layers=0), 8),
        (GEMMA3, dict(sliding_window=9), 8),
        (GEMMA3, dict(sliding_window=9, sliding_window_pattern=1), None),
    ],
)
def test_windows(row, values, expected):
    assert resolve(row.lookback, Config(values)) == expected


@pytest.mark.parametrize(
    "row, values, match",
    [
        (MISTRAL, dict(sliding_window=0), "positive whole number"),
        (MISTRAL, dict(sliding_window="9"), "positive whole number"),
        (MISTRAL, dict(sliding_window=9, is_causal=False), "causal"),
        (QWEN2, dict(sliding_window=9, use_sliding_window=True, layer_types=[]), "config that describes this model"),
    ],
)
def test_windows_that_cannot_be(row, values, match):
    with pytest.raises(Refusal, match=match):
        resolve(row.lookback, Config(values))


def test_a_list_of_layers_that_is_too_short_is_refused():
    with pytest.raises(Refusal, match="config that describes this model"):
        rotary_of(SMOLLM3.rotary, Config(dict(no_rope_layers=[1])), layer=1, d_head=12)


@pytest.mark.parametrize("change", [dict(head_dim=6), dict(num_attention_heads=2), dict(num_key_value_heads=1)])
def test_a_config_that_does_not_explain_the_weights_is_refused(change, tmp_path):
    tiny = case("", "Llama", settings=FOUR | dict(head_dim=12))
    tiny.save(tiny.build(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(Refusal, match="layer 0: expected .* rows in .*_proj.weight.*disagree"):
        heads_of(tmp_path)


def uneven(model):
    """Rows and columns of very different size, so that a scale in the wrong place shows."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            rows, columns = parameter.shape
            parameter.mul_(10 ** torch.rand(rows, 1)).mul_(10 ** torch.rand(columns))


def quantise(weight, block):
    """Eight bits and a scale per block, row or tensor, by loops."""
    height, width = block
    scale = torch.ones(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    whole = torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale[i, j] = weight[part].abs().max() / 448
            whole[part] = weight[part] / scale[i, j]
    return whole.to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(
    "block, suffix, flat",
    [
        ((16, 8), "_scale_inv", False),
        ((1, 1000), "_scale", False),
        ((1, 1000), "_scale", True),
        ((1000, 1000), "_scale", True),
    ],
)
@pytest.mark.parametrize("family", ["DeepseekV3", "Phi3"])
def test_eight_bit_weights_are_taken_with_their_scales(family, block, suffix, flat, tmp_path):
    tiny = case("", family, settings=LATENT | dict(num_key_value_heads=4), prepare=uneven)
    tiny.save(tiny.build(), tmp_path)
    sixteen_bits = heads_of(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name and "attn" in name]:
        tensors[name], scale = quantise(tensors[name], block)
        tensors[name + suffix] = scale.flatten() if flat else scale
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(quantization_config=dict(weight_block_size=block))))
    for exact, coarse in zip(sixteen_bits, heads_of(tmp_path), strict=True):
        for side in ("query", "key"):
            exactly, roughly = getattr(exact, side).weight, getattr(coarse, side).weight
            assert (exactly - roughly).norm() < 0.06 * exactly.norm()


def test_eight_bit_weights_without_scales_are_refused(tmp_path):
    tiny = case("", "Llama")
    tiny.save(tiny.build(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(Refusal, match="16 bits with the tool that quantised it"):
        heads_of(tmp_path)
