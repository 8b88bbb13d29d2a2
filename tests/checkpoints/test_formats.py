"""Every family in every format: the same heads, to the precision of the format."""

import json

import pytest
import torch
from safetensors.torch import load_file

from family_cases import CASES
from locater.scanning.scan import scan

EXACT = dict(rel=1e-6, abs=1e-9)
# Sixteen-bit weights: an eighth of a percent each, so a percent of the Frobenius norm in every moment.
ROUNDED = 0.02


def moments(found):
    return {(row.block, row.layer, row.head): (row.trace, row.trace_of_square, row.frobenius_squared) for row in found}


def save_bin(model, folder, *, shards: int):
    """PyTorch files beside a config, as models were published before safetensors."""
    model.config.save_pretrained(folder)
    state = model.state_dict()
    names = list(state)
    parts = [names[start::shards] for start in range(shards)]
    files = ["pytorch_model.bin"] if shards == 1 else [f"pytorch_model-{n}-of-{shards}.bin" for n in range(shards)]
    for file, part in zip(files, parts, strict=True):
        torch.save({name: state[name].clone() for name in part}, folder / file)
    if shards > 1:
        places = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def as_bin(source, folder):
    """The same tensors and config, the tensors as torch saves them."""
    folder.mkdir()
    torch.save(load_file(source / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "config.json").write_text((source / "config.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_format_does_not_matter(case, tmp_path):
    model = case.build()
    for name in ("whole", "half"):
        (tmp_path / name).mkdir()
    case.save(model, tmp_path / "whole")
    whole = scan(tmp_path / "whole", length=64)
    expected = moments(whole.heads)
    if hasattr(model, "save_pretrained") and not case.as_given:
        model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
        sharded = scan(tmp_path / "sharded", length=64)
        assert sharded.format == "safetensors" and moments(sharded.heads) == expected
        assert sharded.coverage == whole.coverage
    if (tmp_path / "whole" / "model.safetensors").exists():
        as_bin(tmp_path / "whole", tmp_path / "bin")
        pickled = scan(tmp_path / "bin", length=64)
        assert pickled.format == "torch" and moments(pickled.heads) == expected
    model.bfloat16()
    case.save(model, tmp_path / "half")
    for key, rounded in moments(scan(tmp_path / "half", length=64).heads).items():
        scale = expected[key][2]
        assert rounded[0] == pytest.approx(expected[key][0], abs=ROUNDED * scale**0.5 * 4)
        assert rounded[2] == pytest.approx(scale, rel=ROUNDED)


PLAIN = [case for case in CASES if case.name in ("llama", "gpt2", "bert", "t5", "whisper", "vit", "qwen3", "gemma2")]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
@pytest.mark.parametrize("shards", [1, 3])
def test_pytorch_files(case, shards, tmp_path):
    model = case.build()
    case.save(model, tmp_path / "whole")
    folder = tmp_path / "bin"
    folder.mkdir()
    save_bin(model, folder, shards=shards)
    found = scan(folder, length=64)
    assert found.format == "torch"
    assert moments(found.heads) == moments(scan(tmp_path / "whole", length=64).heads)


def test_the_plain_cases_are_all_there():
    assert len(PLAIN) == 8


@pytest.mark.parametrize("case", PLAIN[:3], ids=lambda case: case.name)
def test_distributed_checkpoint(case, tmp_path):
    from torch.distributed.checkpoint import save

    model = case.build()
    model.save_pretrained(tmp_path / "whole")
    save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    model.config.save_pretrained(tmp_path / "dcp")
    found = scan(tmp_path / "dcp", length=64)
    assert found.format == "distributed"
    assert moments(found.heads) == moments(scan(tmp_path / "whole", length=64).heads)
