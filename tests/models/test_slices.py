"""`head_rows` against what is read: for every family, stored and live, and against where gradients arrive."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import stabiliser_models as models
from family_cases import CASES
from locater import Live, checkpoints, head_rows, heads
from saved_models import case_named

# The module that takes all heads' outputs side by side, in layer 0.
OUTPUTS = {
    "gpt2": "h.0.attn.c_proj",
    "gpt-bigcode": "h.0.attn.c_proj",
    "gpt-bigcode-many-keys": "h.0.attn.c_proj",
    "codegen": "h.0.attn.out_proj",
    "gpt-neox": "layers.0.attention.dense",
    "bloom": "h.0.self_attention.dense",
    "falcon-7b": "h.0.self_attention.dense",
    "falcon-rw": "h.0.self_attention.dense",
    "falcon-40b": "h.0.self_attention.dense",
    "mpt": "blocks.0.attn.out_proj",
    "llama": "layers.0.self_attn.o_proj",
    "phi3": "layers.0.self_attn.o_proj",
    "qwen3-next": "layers.3.self_attn.o_proj",
    "deepseek-v2": "layers.0.self_attn.o_proj",
    "deepseek-v2-lite": "layers.0.self_attn.o_proj",
}


def check_rows(source, parameter) -> int:
    """Every head that is read from the source is what its rows say, cut out of whole parameters."""
    rows = {(one.block, one.layer, one.head): one for one in head_rows(source)}
    found = list(heads(source))
    assert rows.keys() == {(head.block, head.layer, head.index) for head in found}
    for head in found:
        at = rows[head.block, head.layer, head.index]
        for projection, part in ((head.query, at.query), (head.key, at.key)):
            cut = part.of(parameter(part.parameter))
            if part.latent is None:
                assert torch.equal(cut, projection.weight)
                continue
            low_rank, latent = projection.low_rank, part.latent
            assert torch.equal(cut, low_rank.up)
            assert torch.equal(latent.down.of(parameter(latent.down.parameter)), low_rank.down)
            assert torch.equal(parameter(latent.gain), low_rank.norm.gain)
            if latent.direct is not None:
                direct = latent.direct.of(parameter(latent.direct.parameter))
                assert torch.equal(direct, projection.weight[part.count :])
    return len(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_are_the_weights_of_every_family(case, tmp_path):
    model = case.build()
    case.save(model, tmp_path)
    with checkpoints.open(tmp_path) as checkpoint:
        assert check_rows(tmp_path, checkpoint.read) > 0
    if isinstance(model, PreTrainedModel):
        check_rows(model, model.state_dict().__getitem__)


@pytest.mark.parametrize("name", models.MODELS)
def test_rows_of_modules_without_a_family(name):
    model = models.MODELS[name]()
    assert check_rows(model, model.get_parameter) > 0


def test_rows_of_a_named_and_of_a_found_projection():
    model = nn.Sequential(models.OwnAttention())
    named = head_rows(Live(model, heads=model[0].heads))
    assert named == head_rows(Live(model, sample=torch.randn(2, 5, 16)))
    assert [(one.query.first, one.key.first) for one in named] == [(0, 0), (4, 0), (8, 4), (12, 4)]
    assert {one.value for one in named} == {None}


@pytest.mark.parametrize("name", OUTPUTS)
def test_one_heads_output_depends_on_its_rows_and_no_others(name):
    """By gradients: the rows that act on a head's output are its query, key and value, wherever the code takes them."""
    model, case = case_named(name).build(), case_named(name)
    output = next(module for path, module in model.named_modules() if path.endswith(OUTPUTS[name]))
    taken = []
    output.register_forward_pre_hook(lambda module, args: taken.append(args[0]))
    model(**case.inputs(model.config))
    layer = 3 if name == "qwen3-next" else 0
    found = [one for one in head_rows(model, layers=[layer]) if one.block == "decoder"]
    columns = taken[0].unflatten(-1, (len(found), -1))
    for one in found:
        parts = [one.query, one.key, *([one.value] if one.value else [])]
        for name in {part.parameter for part in parts}:
            weight = model.get_parameter(name)
            # Squared, since values that sum to a constant have no gradient.
            (by,) = torch.autograd.grad(columns[:, :, one.head].square().sum(), weight, retain_graph=True)
            here = [part for part in parts if part.parameter == name]
            acting = (by.mT if here[0].transposed else by).abs().amax(1) > 0
            expected = torch.zeros_like(acting)
            for part in here:
                expected[part.first : part.stop] = True
            gate = slice(one.query.stop, one.query.stop + one.query.count)
            if name == one.query.parameter and case.name == "qwen3-next":
                acting[gate] = False  # rows of the output's gate follow each query
            assert torch.equal(acting, expected), f"head {one.head}: {name}"
    assert (found[0].value is None) == (case.name in ("llama", "qwen3-next"))  # values in a tensor of their own


def test_the_how_to_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "how-to.md").read_text(encoding="utf-8")
    (block,) = [
        one for one in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "head_rows" in one
    ]
    exec(block, {})
