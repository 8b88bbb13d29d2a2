"""Files of `torch.save`: our lazy reader against `torch.load`, and what it refuses."""

import json
import os
import pickle
import zipfile

import pytest
import torch

from locater import checkpoints
from locater.errors import Refusal

pytestmark = pytest.mark.quick


def assert_same(checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint.names) == set(tensors)
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype and checkpoint.shape(name) == tensor.shape
        assert read.float().equal(tensor.detach().float())
        if tensor.ndim and len(tensor) > 2:
            assert checkpoint.read(name, rows=(1, 3)).float().equal(tensor[1:3].detach().float())


def variety() -> dict[str, torch.Tensor]:
    big = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int8, torch.uint16)
    return {
        "whole": big,
        "view": big[2:5],
        "columns": big[:, 3:7],
        "transposed": big.T,
        "every_second": big[::2],
        "parameter": torch.nn.Parameter(torch.ones(3, 2)),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        **{str(kind): torch.arange(12).reshape(4, 3).to(kind) for kind in kinds},
    }


@pytest.mark.parametrize("is_zip", [True, False])
def test_views_dtypes_and_rows(tmp_path, is_zip):
    tensors = variety()
    torch.save(tensors, tmp_path / "x.pt", _use_new_zipfile_serialization=is_zip)
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.format == "torch"
        assert_same(checkpoint, tensors)


def test_reads_only_what_is_asked(tmp_path, monkeypatch):
    torch.save({"big": torch.zeros(1000, 100), "small": torch.ones(10, 2)}, tmp_path / "x.pt")
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        source, asked = checkpoint.archive.source, []
        original = source.readinto
        monkeypatch.setattr(source, "readinto", lambda start, view: asked.append(len(view)) or original(start, view))
        checkpoint.read("big", rows=(10, 12))
        assert 2 * 400 <= sum(asked) < 2 * 400 + 100


@pytest.mark.parametrize("wrap", [lambda w: {"model": w, "optimizer": {"state": {0: torch.ones(2)}}},
                                  lambda w: {"state_dict": w, "epoch": 3},
                                  lambda w: (w, 3),
                                  lambda w: [{"epoch": 3}, {"model": w}],
                                  lambda w: ({"state": {0: torch.ones(2)}, "param_groups": []}, w),
                                  lambda w: {"state_dict": {"module." + name: t for name, t in w.items()}},
                                  lambda w: {"model": {"_orig_mod." + name: t for name, t in w.items()}},
                                  lambda w: {"a": {"weight": w["a.weight"]}, "b": {"bias": w["b.bias"]}}])  # fmt: skip
def test_wrappers_and_prefixes(tmp_path, wrap):
    weights = {"a.weight": torch.ones(4, 3), "b.bias": torch.zeros(4)}
    torch.save(wrap(weights), tmp_path / "x.pt")
    with checkpoints.open(tmp_path) as checkpoint:
        assert_same(checkpoint, weights)


def test_nanogpt_settings(tmp_path):
    arguments = {"n_layer": 2, "n_head": 3, "bias": False}
    torch.save({"model": {"_orig_mod.a": torch.ones(2)}, "model_args": arguments, "iter_num": 5}, tmp_path / "ckpt.pt")
    with checkpoints.open(tmp_path / "ckpt.pt") as checkpoint:
        assert checkpoint.config == arguments and list(checkpoint.names) == ["a"]


def test_settings_beside_weights_keep_their_tables_and_lists(tmp_path):
    """A stretch of the positions or a list of layers that is dropped would be a default, in silence."""
    table = {"rope_scaling": {"type": "linear", "factor": 4.0}, "layer_types": ("full", "sliding"), "sizes": {2: [1]}}
    settings = table | {"n_head": 3, "kind": torch.float16, "none": None}
    settings["itself"] = settings
    torch.save({"model": {"a": torch.ones(2)}, "config": settings}, tmp_path / "x.pt")
    with checkpoints.open(tmp_path / "x.pt") as checkpoint:
        config = checkpoint.config
    assert {name: config[name] for name in ("rope_scaling", "n_head", "none")} == {
        "rope_scaling": {"type": "linear", "factor": 4.0}, "n_head": 3, "none": None
    }  # fmt: skip
    assert config["layer_types"] == ["full", "sliding"] and config["sizes"] == {"2": [1]}
    assert isinstance(config["kind"], str)
    many: list = [1]
    for _ in range(6):
        many = [many] * 30
    torch.save({"model": {"a": torch.ones(2)}, "config": {"many": many}}, tmp_path / "y.pt")
    with pytest.raises(Refusal, match="settings"):
        checkpoints.open(tmp_path / "y.pt")


def test_state_dict_of_a_module(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    torch.save({"not": "weights"}, tmp_path / "training_args.bin")
    with checkpoints.open(tmp_path) as checkpoint:
        assert_same(checkpoint, module.state_dict())


def test_shards(tmp_path):
    torch.save({"a": torch.ones(3, 2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with checkpoints.open(tmp_path) as checkpoint:
        assert_same(checkpoint, {"a": torch.ones(3, 2), "b": torch.zeros(3)})


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def save_legacy(tree, path) -> None:
    torch.save(tree, path, _use_new_zipfile_serialization=False)


def save_plain_pickle(tree, path) -> None:
    path.write_bytes(pickle.dumps(tree))


@pytest.mark.parametrize("write", [torch.save, save_legacy, save_plain_pickle])
def test_code_is_refused_and_not_run(tmp_path, write):
    write({"a": torch.ones(2), "b": Bomb(tmp_path / "ran")}, tmp_path / "x.pt")
    with pytest.raises(Refusal, match=r"asks for the code .*allow_pickle=True") as caught:
        checkpoints.open(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists() and "\n" not in str(caught.value)


def test_code_is_run_at_the_users_word(tmp_path):
    torch.save(torch.nn.Linear(3, 2), tmp_path / "x.pt")
    with pytest.raises(Refusal, match="torch.nn.modules.linear.Linear"):
        checkpoints.open(tmp_path / "x.pt")
    with checkpoints.open(tmp_path / "x.pt", allow_pickle=True) as checkpoint:
        assert checkpoint.shape("weight") == (2, 3) and checkpoint.read("weight", rows=(1, 2)).shape == (1, 3)


@pytest.mark.parametrize("size", [0, 3, 30, 500, -200])
def test_truncated(tmp_path, size):
    torch.save({"a": torch.ones(100)}, tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:size])
    with pytest.raises(Refusal):
        checkpoints.open(tmp_path / "x.pt")


def rewrite(path, change) -> None:
    """The archive again, with its pickle changed."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in contents.items():
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"\x80\x02(lr\xff\xff\xff\xff.", "tensors by name"),  # a memo number of 2^32: no table of that length
        (b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".", "damaged"),  # bytearray of a terabyte
        (b"\x80\x02B" + (2**31 - 1).to_bytes(4, "little") + b"x.", "damaged|tensors by name"),
        (b"\x80\x02" + b"(" * 10_000 + b".", "damaged"),
        (b"", "damaged"),
        (b"\x80\x02}.", "tensors by name"),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "a storage"),
    ],
)
def test_hostile_pickles(tmp_path, pickled, message):
    torch.save({"a": torch.ones(100)}, tmp_path / "x.pt")
    rewrite(tmp_path / "x.pt", lambda _: pickled)
    with pytest.raises(Refusal, match=message):
        checkpoints.open(tmp_path / "x.pt")


def test_tuples_that_take_for_ever_to_hash(tmp_path):
    doubling = b"\x80\x02}(K\x01K\x02\x86" + b"2\x86" * 70 + b"K\x00u."
    torch.save({"a": torch.ones(100)}, tmp_path / "x.pt")
    rewrite(tmp_path / "x.pt", lambda _: doubling)
    with pytest.raises(Refusal, match="neither a word nor a whole number"):
        checkpoints.open(tmp_path / "x.pt")


def test_a_view_beyond_its_storage(tmp_path):
    torch.save({"a": torch.ones(100)}, tmp_path / "x.pt")
    rewrite(tmp_path / "x.pt", lambda content: content.replace(b"K\x00Kd\x85q", b"K\x00Kz\x85q"))
    with pytest.raises(Refusal, match="within its 400 stored bytes"):
        checkpoints.open(tmp_path / "x.pt")


def test_expanded_tensors_do_not_grow(tmp_path):
    torch.save({"a": torch.ones(1).expand(10**9)}, tmp_path / "x.pt")
    with pytest.raises(Refusal, match="within its 4 stored bytes"):
        checkpoints.open(tmp_path / "x.pt")
