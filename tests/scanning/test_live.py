"""Live modules go the way of files: the same rows, with a config or without."""

import pytest
import torch
from torch import nn

from locater import Live
from locater.scanning.scan import scan
from saved_models import by_place, case_named

pytestmark = pytest.mark.quick

KINDS = "by the kinds of its modules, not run"
CASES = ["gpt2", "llama", "falcon-40b", "deepseek-v2", "jamba", "albert", "t5", "whisper", "clip", "dinov2"]


@pytest.mark.parametrize("name", CASES)
def test_a_live_model_gives_the_rows_of_its_file(name, tmp_path):
    model = case_named(name).build()
    case_named(name).save(model, tmp_path)
    live, stored = scan(model), scan(tmp_path)
    assert (live.source, live.format) == (type(model).__name__, "module")
    ends = "by the table, not run"
    assert live.family == stored.family
    if "a hook on" not in live.coverage:  # some cases mend their model by one
        assert live.coverage == (ends if stored.coverage == "COMPLETE" else f"{stored.coverage}, {ends}")
    assert by_place(live) == by_place(stored)


def dense_form(attention: nn.MultiheadAttention, head: int, gain: torch.Tensor, key_gain: torch.Tensor):
    """W of one head of torch's own attention, whose queries and keys may come from different norms, which centre."""
    query, key, _ = attention.in_proj_weight.detach().double().chunk(3)
    rows = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
    centring = torch.eye(len(gain), dtype=torch.float64) - 1 / len(gain)
    return centring @ (key[rows] * key_gain.double()).T @ (query[rows] * gain.double()) @ centring


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_transformer_without_a_config(norm_first):
    model = nn.Transformer(24, 4, 2, 2, 48, norm_first=norm_first, batch_first=True)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    found = scan(model)
    assert (found.source, found.family, found.coverage) == ("Transformer", "modules", KINDS)
    rows = by_place(found)
    assert [row.block for row in found.heads] == ["encoder"] * 8 + ["decoder"] * 8 + ["cross"] * 8
    last, decoder = model.encoder.norm.weight.detach(), model.decoder.layers[1]
    gain = (decoder.norm2 if norm_first else decoder.norm1).weight.detach()
    for head in range(4):
        dense = dense_form(decoder.multihead_attn, head, gain, last)
        assert rows["cross", 1, head].trace == pytest.approx(float(dense.trace()), rel=1e-4, abs=1e-4)
        assert rows["cross", 1, head].frobenius_squared == pytest.approx(float(dense.square().sum()), rel=1e-4)


def test_a_module_that_cannot_be_read_is_named():
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2, add_bias_kv=True))
    found = scan(model)
    assert found.coverage == f"PARTIAL: 1 of 2 modules, without 1, {KINDS}" and len(found.heads) == 2
    assert len(found.refused) == 1 and "bias_k" in found.refused[0]


def test_what_is_scanned_is_what_the_parameters_are_now():
    model = case_named("llama").build()
    before = scan(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(3)
    after = scan(model)
    for one, other in zip(before.heads, after.heads, strict=True):
        assert other.trace == pytest.approx(one.trace * (3 if one.layer == 0 else 1), rel=1e-4)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_double_precision_is_kept():
    model = case_named("llama").build()
    single, double = scan(model), scan(model.double())
    head, row = model.model.layers[0], double.heads[0]
    gain = head.input_layernorm.weight
    query, key = ((side.weight[:12] * gain).detach() for side in (head.self_attn.q_proj, head.self_attn.k_proj))
    assert row.trace == pytest.approx(float((query * key).sum()), rel=1e-12)
    assert single.heads[0].trace == pytest.approx(row.trace, rel=1e-5)


def test_a_layout_describes_a_live_module(tmp_path):
    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.ModuleList(nn.ModuleDict({"wq": nn.Linear(12, 8), "wk": nn.Linear(12, 8)}) for _ in "ab")

    layout = tmp_path / "layout.yaml"
    row = "{block: decoder, query: 'stack.{layer}.wq', key: 'stack.{layer}.wk', layers: 2, heads: 2, d_head: 4}"
    layout.write_text(f"attention: [{row}]")
    model = Unknown()
    found = scan(Live(model, layout=layout))
    query, key = (side.weight.detach()[4:] for side in (model.stack[1]["wq"], model.stack[1]["wk"]))
    assert len(found.heads) == 4
    assert found.heads[3].trace == pytest.approx(float((query * key).sum()), rel=1e-5, abs=1e-6)
