"""Documents of strangers, changed entry by entry: each is read or refused in a sentence, none is a fault of ours."""

import json
import random

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_damaged_files import write as write_llama
from test_quantised import FILES, KEY, QUERY, stored, write

import locater
from locater import checkpoints
from locater.errors import Refusal, Unforeseen

ODD = (
    None,
    True,
    -1,
    0,
    2**63,
    2**200,
    1e400,
    0.5,
    "",
    "x",
    "\0",
    [],
    [[]],
    {},
    {"a": {}},
    [2**63, 0],
    [None],
    "9" * 5000,
)


def unforeseen(folder, **options) -> str | None:
    """What the net had to catch, if anything."""
    try:
        locater.scan(locater.Stored(folder, **options), length=16)
    except Unforeseen as cause:
        return str(cause)
    except Refusal:
        pass
    return None


def paths(document, path=()):
    if path:
        yield path
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inner:
        yield from paths(value, (*path, key))


def mutated(document, *, seed: int, number: int):
    """The document with one entry, drawn at random, made something else."""
    choose, every = random.Random(seed), list(paths(document))
    for _ in range(number):
        copy = json.loads(json.dumps(document))
        *tables, last = choose.choice(every)
        place = copy
        for key in tables:
            place = place[key]
        place[last] = choose.choice(ODD)
        yield copy


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_parts_of_other_shapes_and_types(path, tmp_path):
    tensors, _, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    caught = []
    for name in [
        name for name in tensors if name.startswith((QUERY.removesuffix(".weight"), KEY.removesuffix(".weight")))
    ]:
        part = tensors[name]
        shapes = [part.flatten(), part[None], part.flatten()[:0], part.flatten()[:1].reshape(()), part[..., None]]
        shapes += [part.mT.contiguous()] if part.dim() > 1 else []
        choose = random.Random(name)  # a few of them each time keep the test short; all names take part
        for other in choose.sample([*shapes, part.to(torch.int64), part.float()], 3):
            if caught_now := unforeseen(write(tmp_path, tensors | {name: other}, settings, notes)):
                caught.append((name, list(other.shape), caught_now))
    assert not caught


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_settings_of_a_quantiser_made_something_else(path, tmp_path):
    tensors, _, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    folder = write(tmp_path, tensors, settings, notes)
    config = json.loads((folder / "config.json").read_text())
    for document in mutated(config, seed=3, number=12):
        (folder / "config.json").write_text(json.dumps(document))
        assert unforeseen(folder) is None, document


def test_entries_of_a_config_made_something_else(tmp_path):
    config = json.loads((write_llama(tmp_path) / "config.json").read_text())
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_theta=300.0)
    config |= dict(rope_parameters=scaling, head_dim=4, rms_norm_eps=1e-5, attention_bias=False, layer_types=["x", "y"])
    for document in mutated(config, seed=4, number=100):
        (tmp_path / "config.json").write_text(json.dumps(document))
        assert unforeseen(tmp_path) is None, document


def test_entries_that_transformers_itself_refuses(tmp_path, monkeypatch):
    """A type that no table names is proven with transformers' classes, whose own checks fail in ways of their own."""
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path / "cache"))
    folder = write_llama(tmp_path / "model", model_type="glm4", head_dim=4, intermediate_size=16, vocab_size=32)
    config = json.loads((folder / "config.json").read_text())
    for entry, value in [("rms_norm_eps", "x"), ("hidden_size", 1.5), ("rope_parameters", "x"), ("layer_types", 7)]:
        (folder / "config.json").write_text(json.dumps(config | {entry: value}))
        assert unforeseen(folder) is None, entry


@pytest.mark.parametrize("dims", [[2**63, 0], [0, 2**63], [2**62, 2**62, 0], [1] * 8, [2**40, 0, 2**40]])
def test_sizes_that_no_tensor_has(dims, tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(2)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((8, 8), np.float32))
    writer.add_tensor("marked", np.zeros((3,) * min(len(dims), 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    at = data.index(b"marked") + len(b"marked")
    count = int.from_bytes(data[at : at + 4], "little")
    sizes = b"".join(size.to_bytes(8, "little") for size in dims)
    path.write_bytes(data[:at] + len(dims).to_bytes(4, "little") + sizes + data[at + 4 + 8 * count :])
    assert unforeseen(path) is None
    header = json.dumps({"x": dict(dtype="F32", shape=dims, data_offsets=[0, 0])}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert unforeseen(tmp_path / "x.safetensors") is None


def test_entries_of_an_adapter_made_something_else(tmp_path):
    base = write_llama(tmp_path / "base")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    factor = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file(
        {f"{factor}A.weight": torch.ones(2, 16), f"{factor}B.weight": torch.ones(16, 2)},
        adapter / "adapter_model.safetensors",
    )
    settings = dict(peft_type="LORA", r=2, lora_alpha=4, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3})
    settings |= dict(modules_to_save=["x"], use_rslora=False, fan_in_fan_out=False, init_lora_weights=True)
    for document in mutated(settings, seed=5, number=50):
        (adapter / "adapter_config.json").write_text(json.dumps(document))
        try:
            checkpoints.open(base, adapter=adapter).close()
        except Unforeseen as cause:
            pytest.fail(f"{document}: {cause}")
        except Refusal:
            pass
        assert unforeseen(base, adapter=adapter) is None, document
