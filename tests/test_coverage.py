"""What a scan says it covers is true: attention that no row reads is counted, and a family known by names says so."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from family_cases import CASES
from locater import scan
from locater.errors import Refusal

pytestmark = pytest.mark.quick


def saved(name, folder):
    case = next(case for case in CASES if case.name == name)
    case.save(case.build(), folder)
    return folder


def add(folder, **tensors):
    stored = load_file(folder / "model.safetensors") | {
        name.replace("__", "."): value for name, value in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def without_type(folder):
    config = json.loads((folder / "config.json").read_text())
    config.pop("model_type")
    (folder / "config.json").write_text(json.dumps(config))


def test_a_decoder_that_no_row_reads_is_counted(tmp_path):
    folder = saved("bert", tmp_path)
    assert scan(folder).coverage == "COMPLETE"
    add(
        folder,
        decoder__layers__0__self_attn__q_proj__weight=torch.ones(4, 4),
        decoder__layers__1__self_attn__q_proj__weight=torch.ones(4, 4),
        decoder__layers__0__self_attn__q_norm__weight=torch.ones(4),
    )
    found = scan(folder).coverage
    assert (
        found.startswith("PARTIAL") and "2 further tensors that look like queries, such as `decoder.layers.0" in found
    )


def test_a_config_without_a_type_is_read_by_the_names_of_one_family(tmp_path):
    folder = saved("bert", tmp_path)
    before = scan(folder)
    without_type(folder)
    found = scan(folder)
    assert found.heads == before.heads and found.family == "bert"
    assert found.coverage == "by its tensor names, as bert, not run"


def test_names_of_many_families_are_not_guessed_at(tmp_path):
    folder = saved("llama", tmp_path)
    without_type(folder)
    with pytest.raises(Refusal, match="no model type"):
        scan(folder)


def test_a_layout_never_offers_a_norm_or_what_is_not_there(tmp_path):
    stored = {
        "blocks.0.attn.query_layernorm.weight": torch.ones(4),
        "blocks.0.attn.query_layernorm.bias": torch.ones(4),
        "blocks.0.attn.wq.weight": torch.ones(4, 4),
        "blocks.0.attn.other.weight": torch.ones(4, 4),
    }
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal) as refused:
        scan(tmp_path)
    layout = str(refused.value).partition("to be completed")[2]
    assert "query: blocks.{layer}.attn.wq\n" in layout and "layernorm" not in layout
    (row,) = yaml.safe_load(layout.partition("\n")[2])["attention"]
    assert (row["layers"], row["key"], row["heads"]) == (1, None, None)
    (tmp_path / "config.json").write_text('{"n_heads": 2, "head_dim": 2}')
    with pytest.raises(Refusal) as refused:
        scan(tmp_path)
    (row,) = yaml.safe_load(str(refused.value).partition("to be completed:\n")[2])["attention"]
    assert (row["heads"], row["key_heads"], row["d_head"]) == (2, 2, 2)
