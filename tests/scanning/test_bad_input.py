"""Whatever the files hold, the command says one sentence and exits with 1: never a traceback."""

import json
import pickle
import random
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from command import locater
from family_cases import CASES


@pytest.fixture
def folder(tmp_path):
    next(case for case in CASES if case.name == "llama").build().save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def rewrite_header(folder, change):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def first(header):
    return next(entry for name, entry in header.items() if "q_proj.weight" in name)


class Code:
    def __reduce__(self):
        return (open, ("executed", "w"))


def write_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def write_index(folder, file):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": {"model.layers.0.self_attn.q_proj.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def only(folder, name, data):
    for file in folder.glob("*.safetensors"):
        file.unlink()
    (folder / name).write_bytes(data)


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


BAD = {
    "truncated": truncated,
    "header of 2^63 bytes": lambda folder: only(folder, "model.safetensors", struct.pack("<Q", 2**63) + b"{}"),
    "offsets out of range": lambda f: rewrite_header(f, lambda h: first(h).update(data_offsets=[0, 10**12])),
    "overlapping offsets": lambda f: rewrite_header(
        f, lambda h: first(h).update(data_offsets=[n + 8 for n in first(h)["data_offsets"]])
    ),
    "wrong dtype": lambda f: rewrite_header(f, lambda h: first(h).update(dtype="Q7")),
    "missing shard": lambda f: write_index(f, "gone.safetensors"),
    "index that climbs": lambda f: write_index(f, "../../x"),
    "no head count": lambda f: write_config(f, num_attention_heads=None, num_key_value_heads=None),
    "heads that do not divide": lambda f: write_config(f, num_attention_heads=5),
    "head count in words": lambda f: write_config(f, num_attention_heads="four"),
    "too many layers": lambda f: write_config(f, num_hidden_layers=-1),
    "broken config": lambda f: (f / "config.json").write_text("{"),
    "pickle with code": lambda f: only(f, "pytorch_model.bin", pickle.dumps({"a": Code()})),
    "absurd GGUF": lambda f: only(f, "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60)),
    "empty directory": lambda f: [file.unlink() for file in f.iterdir()],
}


@pytest.mark.parametrize("name", BAD)
def test_one_sentence_and_exit_1(name, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    BAD[name](folder)
    result = locater("scan", folder, "--json", folder.parent / "out.json")
    assert result.code == 1, result.out
    assert result.err.startswith("locater: ") and len(result.err.strip().splitlines()) == 1
    assert not (folder.parent / "out.json").exists()
    assert not (folder.parent / "executed").exists()


@pytest.mark.parametrize(
    "source", ["no-such-model-anywhere", "no-such/model", "https://127.0.0.1:9/model", "./nothing.gguf", "hf://a/b"]
)
def test_sources_that_are_not_there(source):
    result = locater("scan", source)
    assert result.code == 1 and len(result.err.strip().splitlines()) == 1


def test_weights_of_whole_numbers(folder):
    """In a process of its own, where nothing checks annotations before we do."""
    rewrite_header(folder, lambda header: first(header).update(dtype="I32"))
    command = [sys.executable, "-m", "locater.cli", "scan", folder, "--layers", "0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "floating-point" in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_all_heads_damaged(tmp_path):
    model = next(case for case in CASES if case.name == "llama").build()
    tensors = {name: value.clone() * float("nan") for name, value in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    result = locater("scan", tmp_path)
    assert result.code == 1 and "layer 0, head 0" in result.err and "NaN" in result.err


def mutated(data: bytes | bytearray, chance: random.Random) -> bytes | bytearray:
    """A few bytes changed, dropped or doubled, mostly near the start, where structure is."""
    data = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 20))):
        place = int(len(data) * chance.random() ** chance.choice((1, 4)))
        match chance.randrange(3):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[place : place + chance.randrange(1, 9)]
            case 2:
                data[place:place] = data[place : place + chance.randrange(1, 9)]
    return bytes(data)


def fuzz(folder, count, seed):
    chance = random.Random(seed)
    files = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    codes = []
    for _ in range(count):
        for name, data in files.items():
            (folder / name).write_bytes(mutated(data, chance) if chance.random() < 0.6 else data)
        result = locater("scan", folder, "--length", 16)  # a traceback would be raised here
        assert result.code in (0, 1)
        codes.append(result.code)
    return codes


def test_fuzz(folder):
    codes = fuzz(folder, 200, seed=0)
    assert 0 in codes and 1 in codes


@pytest.mark.slow
def test_fuzz_long(folder):
    fuzz(folder, 2000, seed=1)


def test_torch_files_run_no_code_unless_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Code()}, tmp_path / "model.pt")
    result = locater("scan", tmp_path / "model.pt")
    assert result.code == 1 and not (tmp_path / "executed").exists()
