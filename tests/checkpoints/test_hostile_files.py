"""Files of strangers: nothing in them runs, and nothing that they say of other places is followed."""

import json
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

import locater
from locater import checkpoints
from locater.errors import Refusal
from locater.prediction.language_model import load_model, load_tokenizer
from locater_lab.train.processes import Processes
from locater_lab.train.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "base",
    [
        "reference::http://127.0.0.1:9/r.json",
        "http://127.0.0.1:9/x",
        "memory://place",
        "file:///etc",
        "a/b/c",
        "/no/such",
    ],
)
def test_the_base_of_an_adapter_is_a_directory_or_a_hub_id(base, tmp_path, monkeypatch):
    def reached(*_, **__):
        raise AssertionError("the address was followed")

    monkeypatch.setattr("fsspec.core.url_to_fs", reached)
    settings = {"peft_type": "LORA", "base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(Refusal, match="a directory or a hub id as the base"):
        checkpoints.open(tmp_path)


@pytest.mark.parametrize(
    "address", ["reference://x", "simplecache::http://127.0.0.1:9/x.safetensors", "zip://a::memory://b", "python://x"]
)
def test_chains_and_unlisted_protocols_are_refused(address):
    with pytest.raises(Refusal, match="an address that can be read.*or use one of http"):
        checkpoints.open(address)


def store_in(folder):
    """A run's checkpoint of one tensor."""
    store = Store(folder, Processes(0, 1, torch.device("cpu")), {}, verified=False)
    (folder / "step-1").mkdir(parents=True)
    dcp.save({"a": torch.ones(3)}, checkpoint_id=folder / "step-1", no_dist=True)
    (folder / "index.json").write_text(json.dumps({"last": "step-1"}))
    return store


def change_metadata(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_resuming_runs_nothing_that_the_folder_holds(tmp_path):
    store, state = store_in(tmp_path), {"a": torch.zeros(3)}
    store.load(state)
    assert state["a"].equal(torch.ones(3))
    change_metadata(tmp_path / "step-1", lambda metadata: setattr(metadata, "planner_data", Bomb(tmp_path / "ran")))
    with pytest.raises(Refusal, match="asks for the code"):
        store.load(state)
    assert not (tmp_path / "ran").exists()


def test_objects_beside_the_tensors_are_looked_at_too(tmp_path):
    """torch unpickles entries that are no tensors, whatever the run expects there."""
    store = store_in(tmp_path)
    folder = tmp_path / "step-1"
    with (folder / "bomb.distcp").open("wb") as file:
        torch.save(Bomb(tmp_path / "ran"), file)

    def change(metadata):
        metadata.state_dict_metadata["a"] = BytesStorageMetadata()
        info = metadata.storage_data.popitem()[1]
        place = type(info)("bomb.distcp", 0, (folder / "bomb.distcp").stat().st_size)
        metadata.storage_data[MetadataIndex("a")] = place

    change_metadata(folder, change)
    with pytest.raises(Refusal, match="asks for the code"):
        store.load({"a": torch.zeros(3)})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_models_own_code_is_not_run_and_not_asked_for(load, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    code = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n"
    (tmp_path / "code.py").write_text(code)
    remote = {"AutoConfig": "code.C", "AutoModel": "code.M", "AutoTokenizer": ["code.T", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", "auto_map": remote}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": remote, "tokenizer_class": "T"}))
    with pytest.raises(Refusal, match="transformers can load|a tokenizer in"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_pickles_of_a_model_to_run_go_through_our_interpreter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    torch.save(
        {"transformer.wte.weight": torch.ones(2, 2), "x": Bomb(tmp_path / "ran")}, tmp_path / "pytorch_model.bin"
    )
    with pytest.raises(Refusal, match="pytorch_model.bin.*asks for the code"):
        load_model(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_pickles_are_allowed_for_the_named_source_alone_and_with_a_warning(tmp_path):
    torch.save(torch.nn.Linear(3, 2), tmp_path / "x.pt")
    with pytest.warns(UserWarning, match="x.pt: its code is run"):
        checkpoints.open(tmp_path / "x.pt", allow_pickle=True).close()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8}))
    torch.save({"base_model.model.x.lora_A.weight": Bomb(tmp_path / "ran")}, adapter / "adapter_model.bin")
    save_file({"x.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match="asks for the code"):
        checkpoints.open(tmp_path / "model.safetensors", adapter=adapter, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_a_distributed_checkpoint_wins_over_stray_pickles(tmp_path):
    dcp.save({"model": {"a.weight": torch.ones(3, 2)}}, checkpoint_id=tmp_path)
    torch.save({"args": Bomb(tmp_path / "ran")}, tmp_path / "common.pt")
    with checkpoints.open(tmp_path) as opened:
        assert opened.format == "distributed" and [*opened.names] == ["a.weight"]


def test_chunks_that_overlap_are_refused(tmp_path):
    """Two boxes of three rows in a tensor of six: the same rows twice, the others never."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(6, 2)}, checkpoint_id=tmp_path)
    with (tmp_path / "parts.distcp").open("wb") as file:
        spans = []
        for _ in range(2):
            start = file.tell()
            torch.save(torch.ones(3, 2), file)
            spans.append((start, file.tell() - start))

    def change(metadata):
        metadata.state_dict_metadata["a"].chunks = [
            ChunkStorageMetadata(torch.Size((row, 0)), torch.Size((3, 2))) for row in (0, 1)
        ]
        info = metadata.storage_data.popitem()[1]
        for row, span in zip((0, 1), spans, strict=True):
            metadata.storage_data[MetadataIndex("a", torch.Size((row, 0)))] = type(info)("parts.distcp", *span)

    change_metadata(tmp_path, change)
    with pytest.raises(Refusal, match="chunks that make up 'a'"):
        checkpoints.open(tmp_path)


@pytest.mark.parametrize(
    "file", ["%2e%2e/x.safetensors", "../x.safetensors", "/x.safetensors", "http://x/y.safetensors"]
)
def test_an_index_does_not_leave_its_folder(file, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(Refusal, match="names of files next to"):
        checkpoints.open(tmp_path)


@pytest.mark.parametrize("entry", ["num_hidden_layers", "num_attention_heads"])
def test_a_config_cannot_ask_for_endless_work(entry, tmp_path):
    config = dict(model_type="llama", hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    (tmp_path / "config.json").write_text(json.dumps(config | {entry: 10**9}))
    tensors = {f"model.layers.0.self_attn.{side}_proj.weight": torch.ones(8, 8) for side in "qk"}
    save_file(tensors | {"model.layers.0.input_layernorm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(Refusal, match=r"at most \d+ (layers|heads)"):
        locater.scan(tmp_path)
