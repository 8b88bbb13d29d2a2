"""Safetensors: our reader against the reference library, and what it refuses."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from locater import checkpoints
from locater.checkpoints.safetensors import DTYPES
from locater.errors import Refusal

pytestmark = pytest.mark.quick


def tensor_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(6, 4).to(dtype)


def write_raw(path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def item(start: int, stop: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.ones(3, 2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(5)}, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.view(torch.uint8).equal(b.view(torch.uint8))


def test_every_dtype_and_any_rows(tmp_path):
    tensors = {name: tensor_of(dtype) for name, dtype in DTYPES.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    with checkpoints.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.format == "safetensors"
        assert set(checkpoint.names) == set(tensors)
        for name, tensor in tensors.items():
            assert checkpoint.shape(name) == (6, 4) and checkpoint.entries[name].dtype == tensor.dtype
            assert equal(checkpoint.read(name), tensor)
            assert equal(checkpoint.read(name, rows=(2, 5)), tensor[2:5].contiguous())
            assert checkpoint.read(name, rows=(3, 3)).shape == (0, 4)


def test_scalars_and_empty_tensors(tmp_path):
    save_file({"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}, tmp_path / "x.safetensors")
    with checkpoints.open(tmp_path / "x.safetensors") as checkpoint:
        assert checkpoint.read("scalar").item() == 2.5
        assert checkpoint.read("empty").shape == (0, 3)
        assert checkpoint.config == {}
        with pytest.raises(Refusal, match="rows within scalar"):
            checkpoint.read("scalar", rows=(0, 1))
        with pytest.raises(Refusal, match="nearest name is scalar"):
            checkpoint.read("scaler")


@pytest.mark.parametrize("rows", [(-1, 2), (2, 1), (0, 7)])
def test_rows_outside(tmp_path, rows):
    save_file({"x": torch.ones(6, 2)}, tmp_path / "x.safetensors")
    with checkpoints.open(tmp_path / "x.safetensors") as checkpoint, pytest.raises(Refusal, match="rows within x"):
        checkpoint.read("x", rows=rows)


def test_shards_by_index(sharded):
    with checkpoints.open(sharded) as checkpoint:
        assert checkpoint.config["model_type"] == "llama" and checkpoint.format == "safetensors"
        assert checkpoint.read("a", rows=(1, 2)).equal(torch.ones(1, 2))
        assert checkpoint.read("b").equal(torch.zeros(5))


def test_shards_without_index(sharded):
    (sharded / "model.safetensors.index.json").unlink()
    with checkpoints.open(sharded) as checkpoint:
        assert list(checkpoint.names) == ["a", "b"]
    (sharded / "model-00002-of-00002.safetensors").unlink()
    (sharded / "model-00003-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(Refusal, match="no model-00002-of-00002.safetensors"):
        checkpoints.open(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../../x.safetensors"}, "names of files next to"),
        ({"a": "/etc/passwd"}, "names of files next to"),
        ({"a": 3}, "names of files next to"),
        ({"c": "model-00001-of-00002.safetensors"}, "'c' in model-00001-of-00002.safetensors"),
        ({"a": "model-00009-of-00002.safetensors"}, "missing the file"),
        ({}, "a weight_map of names"),
        ([1], "a weight_map of names"),
    ],
)
def test_bad_index(sharded, weight_map, message):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Refusal, match=message):
        checkpoints.open(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"{", "valid JSON"), (b"\xff\xfe{}", "valid JSON"), (b"[]", "a JSON object"), (b'{"a":1,"a":2}', "'a' twice")],
)
def test_bad_config(sharded, text, message):
    (sharded / "config.json").write_bytes(text)
    with pytest.raises(Refusal, match=message):
        checkpoints.open(sharded)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": item(0, 8, [2]), "y": item(4, 12, [2])}, 12, "an overlap"),
        ({"x": item(0, 8, [2]), "y": item(12, 16, [1])}, 16, "a gap"),
        ({"x": item(0, 8, [2])}, 4, "to hold bytes"),
        ({"x": item(0, 8, [2])}, 12, "to end at byte"),
        ({"x": item(0, 8, [3])}, 8, "12 bytes for tensor 'x'"),
        ({"x": item(8, 0, [2])}, 8, "8 bytes for tensor 'x'"),
        ({"x": item(0, 8, [2], "F33")}, 8, "a known dtype"),
        ({"x": item(0, 8, [2], ["F32"])}, 8, "a known dtype"),
        ({"x": item(0, 8, [-2])}, 8, "whole numbers"),
        ({"x": item(0, 8, [2.0])}, 8, "whole numbers"),
        ({"x": item(0, 8, [2**63, 2])}, 8, "whole numbers"),
        ({"x": item(0, 8, [2**62, 2**62])}, 8, "bytes for tensor"),
        ({"x": {"dtype": "F32"}}, 8, "dtype, shape and data_offsets"),
        ({"x": 1}, 8, "dtype, shape and data_offsets"),
        (b'{"x":1,"x":2}', 0, "'x' twice"),
        (b"{" * 5000, 0, "valid JSON"),
        (b"[" * 200_000, 0, "valid JSON"),
        (b"\xff" * 20, 0, "valid JSON"),
    ],
)
def test_bad_header(tmp_path, header, data, message):
    write_raw(tmp_path / "x.safetensors", header, bytes(data))
    with pytest.raises(Refusal, match=message) as caught:
        checkpoints.open(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 3])
def test_absurd_header_length(tmp_path, length):
    write_raw(tmp_path / "x.safetensors", {"x": item(0, 4, [1])}, bytes(4), length=length)
    with pytest.raises(Refusal, match="a header of at most|valid JSON"):
        checkpoints.open(tmp_path / "x.safetensors")


@pytest.mark.parametrize("size", [0, 3, 8, 40])
def test_truncated(tmp_path, size):
    save_file({"x": torch.ones(6, 2)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[:size])
    with pytest.raises(Refusal, match="truncated"):
        checkpoints.open(tmp_path / "x.safetensors")


def test_a_whole_file_goes_before_an_index_as_in_transformers(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    weight_map = {"a": "model-00001-of-00001.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with checkpoints.open(tmp_path) as checkpoint:
        assert checkpoint.read("a").equal(torch.ones(2))


def test_tensors_that_an_index_does_not_name_are_there_all_the_same(tmp_path):
    """transformers loads the files whole: a bias that the index leaves out acts."""
    save_file({"a.weight": torch.ones(2), "a.bias": torch.ones(3)}, tmp_path / "model-00001-of-00001.safetensors")
    weight_map = {"a.weight": "model-00001-of-00001.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with checkpoints.open(tmp_path) as checkpoint:
        assert sorted(checkpoint.names) == ["a.bias", "a.weight"] and checkpoint.read("a.bias").equal(torch.ones(3))


def test_the_file_that_a_config_names_is_read_as_transformers_reads_it(tmp_path):
    for number, name in enumerate(("model", "later")):
        save_file({"a": torch.full((2,), float(number))}, tmp_path / f"{name}.safetensors")
    for named, expected in (({}, 0.0), ({"transformers_weights": "later.safetensors"}, 1.0)):
        (tmp_path / "config.json").write_text(json.dumps(named))
        assert checkpoints.open(tmp_path).read("a").tolist() == [expected] * 2
        assert checkpoints.open(tmp_path / "model.safetensors").read("a").tolist() == [0.0] * 2
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "../x.safetensors"}))
    with pytest.raises(Refusal, match="names of files next to config.json"):
        checkpoints.open(tmp_path)
