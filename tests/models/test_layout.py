"""Models of no known family: the refusal that helps, and the layout file that describes them."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from command import locater
from locater.models.registry import FAMILIES

pytestmark = pytest.mark.quick

GUIDE = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
LAYOUT = re.search(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)[1]


@pytest.fixture
def unknown(tmp_path):
    """A model with names of its own: width 32, four heads of eight, two key heads, two layers."""
    tensors = {}
    for layer in range(2):
        tensors[f"blocks.{layer}.attention.wq.weight"] = torch.randn(32, 32)
        tensors[f"blocks.{layer}.attention.wk.weight"] = torch.randn(16, 32)
        tensors[f"blocks.{layer}.norm.weight"] = torch.rand(32) + 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "novel"}')
    return tmp_path


def test_an_unknown_model_is_refused_with_what_would_describe_it(unknown):
    result = locater("scan", unknown)
    assert result.code == 1
    assert "'novel'" in result.err and "--layout" in result.err
    assert "blocks.{layer}.attention.wq.weight" in result.err
    assert "query: blocks.{layer}.attention.wq" in result.err and "key: blocks.{layer}.attention.wk" in result.err


def test_the_guides_layout_describes_it(unknown):
    (unknown / "layout.yaml").write_text(LAYOUT)
    result = locater("scan", unknown, "--layout", unknown / "layout.yaml", "--json", "-")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["family"] == "mine" and len(document["heads"]) == 8
    row = document["heads"][3]
    from safetensors.torch import load_file

    tensors = load_file(unknown / "model.safetensors")
    gain = tensors["blocks.0.norm.weight"]
    query = tensors["blocks.0.attention.wq.weight"][24:32] * gain
    key = tensors["blocks.0.attention.wk.weight"][8:16] * gain
    assert (row["layer"], row["head"], row["key_head"]) == (0, 3, 1)
    assert row["trace"] == pytest.approx(float((query * key).sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attention: 3", "list `attention`"),
        ("[", "readable YAML"),
        ("attention: [{block: decoder}]", "query, key"),
        ("attention: [{block: decoder, query: a, key: b, colour: red}]", "colour"),
        ("attention: [{block: sideways, query: a, key: b}]", "sideways"),
        ("attention: [{block: decoder, query: a, key: b, rotary: 7}]", "table at attention[0].rotary"),
        ("attention: [{block: decoder, query: a, key: b, heads: [1]}]", "a number, a word"),
        ("attention: []", "blocks among"),
        ("[" * 100_000, "at most 64 tables and lists"),
        (f"attention: [{'a,' * 100_000}]", "at most 131072 layout bytes"),  # a minute of the YAML reader, at a megabyte
    ],
)
def test_a_bad_layout_is_one_sentence(unknown, text, words):
    (unknown / "layout.yaml").write_text(text)
    result = locater("scan", unknown, "--layout", unknown / "layout.yaml")
    assert result.code == 1
    assert words in result.err and len(result.err.strip().splitlines()) == 1


def test_the_guide_names_every_family():
    for family in FAMILIES:
        for model_type in family.model_types or (family.name,):
            assert f"`{model_type}`" in GUIDE, model_type
