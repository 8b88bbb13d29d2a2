"""Directories of `torch.distributed.checkpoint`, written here and read without it."""

import os
import pickle
import shutil
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata, MetadataIndex

from locater import checkpoints
from locater.errors import Refusal

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    weights = {"a.weight": torch.randn(6, 4), "a.bias": torch.randn(6).bfloat16(), "scale": torch.tensor(2.0)}
    dcp.save({"model": weights, "optim": {"state": {"0": torch.ones(3)}}, "step": 5}, checkpoint_id=tmp_path)
    return tmp_path, weights


def change_metadata(folder, change) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def split_in_four(folder, source, name: str) -> None:
    """Turn one chunk into four boxes over four files, as four ranks would write them."""
    with (folder / "parts.distcp").open("wb") as file:
        boxes = {}
        for offsets in [(0, 0), (0, 3), (4, 0), (4, 3)]:
            part = source[
                offsets[0] : offsets[0] + 4 - offsets[0] // 2, offsets[1] : offsets[1] + 3 - offsets[1] * 2 // 3
            ]
            start = file.tell()
            torch.save(part.clone(), file)
            boxes[offsets] = (part.shape, start, file.tell() - start)

    def change(metadata):
        record = metadata.state_dict_metadata[name]
        record.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(box[0])) for o, box in boxes.items()]
        old = next(index for index in metadata.storage_data if index.fqn == name)
        info = metadata.storage_data.pop(old)
        for offsets, (_, start, length) in boxes.items():
            place = type(info)("parts.distcp", start, length)
            metadata.storage_data[MetadataIndex(name, torch.Size(offsets))] = place

    change_metadata(folder, change)


def test_reads_what_was_saved(saved):
    folder, weights = saved
    with checkpoints.open(folder) as checkpoint:
        assert checkpoint.format == "distributed" and set(checkpoint.names) == set(weights)
        for name, tensor in weights.items():
            assert checkpoint.shape(name) == tensor.shape and checkpoint.read(name).equal(tensor)
        assert checkpoint.read("a.weight", rows=(2, 5)).equal(weights["a.weight"][2:5])


def test_chunks_of_several_ranks(saved):
    folder, weights = saved
    split_in_four(folder, weights["a.weight"], "model.a.weight")
    with checkpoints.open(folder) as checkpoint:
        assert checkpoint.read("a.weight").equal(weights["a.weight"])
        for rows in [(0, 6), (1, 3), (3, 5), (5, 6), (2, 2)]:
            assert checkpoint.read("a.weight", rows=rows).equal(weights["a.weight"][rows[0] : rows[1]])


def test_agrees_with_torch(saved):
    folder, weights = saved
    target = {"model": {"a.weight": torch.zeros(6, 4)}}
    dcp.load(target, checkpoint_id=folder)
    with checkpoints.open(folder) as checkpoint:
        assert checkpoint.read("a.weight").equal(target["model"]["a.weight"])


def test_missing_file(saved):
    (saved[0] / "__0_0.distcp").unlink()
    with pytest.raises(Refusal, match="missing the file __0_0.distcp"):
        checkpoints.open(saved[0])


def test_path_outside(saved):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../" + info.relative_path

    change_metadata(saved[0], change)
    shutil.copy(saved[0] / "__0_0.distcp", saved[0].parent)
    with pytest.raises(Refusal, match="names of files next to .metadata"):
        checkpoints.open(saved[0])


@pytest.mark.parametrize("offset", [10**6, 2**62, -1, "x"])
def test_place_outside(saved, offset):
    change_metadata(saved[0], lambda m: [setattr(info, "offset", offset) for info in m.storage_data.values()])
    with pytest.raises(Refusal, match="to hold bytes|whole numbers"):
        checkpoints.open(saved[0])


def test_missing_chunk(saved):
    folder, weights = saved
    split_in_four(folder, weights["a.weight"], "model.a.weight")
    change_metadata(folder, lambda m: m.state_dict_metadata["model.a.weight"].chunks.pop())
    with pytest.raises(Refusal, match="chunks that make up"):
        checkpoints.open(folder)


def test_code_in_metadata(saved, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (saved[0] / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(Refusal, match="asks for the code"):
        checkpoints.open(saved[0])
    assert not (tmp_path / "ran").exists()


def written_by(function, arguments):
    """A pickle that has `function` called."""
    return type("Written", (), {"__reduce__": lambda self: (function, arguments)})()


def test_metadata_of_early_python_3_11_is_read_and_its_getattr_is_for_nothing_else(saved, monkeypatch):
    """Those versions write a member of an enumeration as getattr(class, name); Debian 12 has one of them."""
    folder, weights = saved
    with monkeypatch.context() as then:
        then.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
        change_metadata(folder, lambda metadata: None)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    with checkpoints.open(folder) as checkpoint:
        assert checkpoint.read("a.weight").equal(weights["a.weight"])
    for arguments in ((_MEM_FORMAT_ENCODING, "mro"), (OrderedDict, "TORCH_"), (_MEM_FORMAT_ENCODING, 5)):
        (folder / ".metadata").write_bytes(pickle.dumps(written_by(getattr, arguments)))
        with pytest.raises(Refusal, match=r"asks for the code 'builtins\.getattr'"):
            checkpoints.open(folder)
