"""What is chosen, what is refused before any format is known, what is imported, and how much memory a scan takes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from locater import checkpoints
from locater.errors import Refusal


def test_importing_loads_no_extra():
    code = "import sys, locater.checkpoints; print([m for m in sys.argv[1:] if m in sys.modules])"
    extras = ["transformers", "huggingface_hub", "gguf", "fsspec", "aiohttp", "peft"]
    result = subprocess.run([sys.executable, "-c", code, *extras], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_safetensors_before_pickles(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    assert checkpoints.open(tmp_path).format == "torch"
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert checkpoints.open(tmp_path).format == "safetensors"
    assert checkpoints.open(str(tmp_path / "pytorch_model.bin")).format == "torch"


def test_one_file_of_any_name(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "whatever.safetensors")
    assert list(checkpoints.open(tmp_path).names) == ["a"]
    save_file({"b": torch.ones(2)}, tmp_path / "another.safetensors")
    with pytest.raises(Refusal, match="name one"):
        checkpoints.open(tmp_path)


def test_empty_directory(tmp_path):
    with pytest.raises(Refusal, match="missing weights in"):
        checkpoints.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal, match="missing weights in"):
        checkpoints.open(tmp_path)


def test_weights_one_folder_further_in_are_pointed_at(tmp_path):
    (tmp_path / "model").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refusal, match=r"there are weights in .*/model$"):
        checkpoints.open(tmp_path)


def test_a_misspelt_path_is_told_what_stands_there(tmp_path):
    (tmp_path / "with" / "model").mkdir(parents=True)
    with pytest.raises(Refusal, match=r"no such file or folder; did you mean .*/with\?"):
        checkpoints.open(tmp_path / "wiht" / "model")
    with pytest.raises(Refusal, match="check the spelling"):
        checkpoints.open(tmp_path / "nothing" / "alike")


def test_things_that_are_not_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    for source in (tmp_path / "pipe.safetensors", "/dev/zero"):
        with pytest.raises(Refusal, match="which is neither"):
            checkpoints.open(source)
    with pytest.raises(Refusal, match="missing weights in"):
        checkpoints.open(tmp_path)


def test_unknown_suffix(tmp_path):
    (tmp_path / "weights.h5").write_bytes(b"x")
    with pytest.raises(Refusal, match="weights ending in"):
        checkpoints.open(tmp_path / "weights.h5")


@pytest.mark.parametrize("source", ["x" * 5000, "a\0b", "/nowhere/model.safetensors"])
def test_impossible_paths(source):
    with pytest.raises(Refusal):
        checkpoints.open(source)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = checkpoints.open(tmp_path)

    def forbid(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", forbid)
    with pytest.raises(Refusal, match="Permission denied"):
        checkpoint.read("a")


MEGABYTES, COUNT = 16, 8
SCAN = """
import json, sys
from locater import checkpoints

def peak():
    # Not ru_maxrss, which counts what the parent held when this program was started.
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

with checkpoints.open(sys.argv[1]) as checkpoint:
    for name in checkpoint.names:
        checkpoint.read(name)
before = peak()
with checkpoints.open(sys.argv[2]) as checkpoint:
    total = sum(float(checkpoint.read(name)[-1, -1]) for name in checkpoint.names)
print(json.dumps([before, peak(), total]))
"""


def write(kind: str, folder, side: int) -> str:
    folder.mkdir()
    tensors = {f"t{i}": torch.full((side, 1024), float(i)) for i in range(COUNT)}
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif kind == "gguf":
        import gguf

        writer = gguf.GGUFWriter(folder / "x.gguf", "qwen2")
        for name, tensor in tensors.items():
            writer.add_tensor(name, tensor.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    elif kind == "distributed":
        torch.distributed.checkpoint.save(tensors, checkpoint_id=folder)
    else:
        torch.save(tensors, folder / "x.pt", _use_new_zipfile_serialization=kind == "torch")
    return str(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["safetensors", "torch", "legacy", "gguf", "distributed"])
def test_a_scan_holds_one_tensor_at_a_time(kind, tmp_path):
    import torch.distributed.checkpoint  # noqa: F401  (one of the writers needs it)

    small, large = write(kind, tmp_path / "small", 2), write(kind, tmp_path / "large", MEGABYTES * 256)
    result = subprocess.run([sys.executable, "-c", SCAN, small, large], capture_output=True, text=True, check=True)
    before, after, total = json.loads(result.stdout)
    assert total == sum(range(COUNT))
    # All of it would be 8 × 16; two tensors and some slack show that each is let go.
    assert after - before < 3 * MEGABYTES + 8
