"""Damaged files: whatever bytes change, reading gives numbers or one sentence, in bounded time and memory."""

import json
import random
import signal
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from locater import checkpoints
from locater.errors import Refusal

FORMATS = ("safetensors", "index", "torch", "legacy", "gguf", "distributed")
SECONDS_EACH, MAX_MEGABYTES = 10, 1000
EXTREMES = [struct.pack("<Q", value) for value in (0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)]


def weights() -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.arange(32 * 32, dtype=torch.float32).reshape(32, 32) for i in range(2)}


def write_safetensors(folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file(weights(), folder / "model.safetensors")
    return folder / "model.safetensors"


def write_index(folder: Path) -> Path:
    write_safetensors(folder)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights(), "model.safetensors")})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder / "model.safetensors.index.json"


def write_torch(folder: Path, *, is_zip: bool = True) -> Path:
    path = folder / "pytorch_model.bin"
    torch.save({"model": weights(), "model_args": {"n": 1}}, path, _use_new_zipfile_serialization=is_zip)
    return path


def write_gguf(folder: Path) -> Path:
    import gguf

    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    writer.add_head_count(4)
    writer.add_block_count(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_tensor("blk.0.attn_q.weight", np.ones((32, 32), np.float32))
    packed = np.zeros((32, 34), np.uint8)
    writer.add_tensor("blk.0.attn_k.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "x.gguf"


def write_distributed(folder: Path) -> Path:
    import warnings

    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    dcp.save({"model": weights(), "step": 1}, checkpoint_id=folder)
    return folder / ".metadata"


WRITERS = {
    "safetensors": write_safetensors,
    "index": write_index,
    "torch": write_torch,
    "legacy": lambda folder: write_torch(folder, is_zip=False),
    "gguf": write_gguf,
    "distributed": write_distributed,
}


def mutate(data: bytes, chance: random.Random) -> bytes:
    """One to four damages; headers, which are most delicate, are hit most."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        # Headers stand first, the directory of an archive last.
        place = chance.choice([chance.randrange(min(1500, len(result) or 1)), chance.randrange(len(result) or 1)])
        place = len(result) - 1 - place if chance.random() < 0.2 else place
        kind = chance.randrange(6)
        if kind == 0:
            result[place : place + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            result[place : place + 8] = chance.choice(EXTREMES)
        elif kind == 2:
            del result[place:]
        elif kind == 3:
            del result[place : place + chance.randint(1, 30)]
        elif kind == 4:
            result[place:place] = result[place : place + chance.randint(1, 60)]
        else:
            result[place : place + 4] = chance.choice([b"}", b'"', b"9999999999", b"-1", b"../x", b"\xff\xff", b"[["])
    return bytes(result)


def attempt(folder: Path) -> str:
    """What came of opening the folder and reading all it holds."""
    try:
        with checkpoints.open(folder) as checkpoint:
            for name in checkpoint.names:
                tensor = checkpoint.read(name)
                assert tuple(tensor.shape) == checkpoint.shape(name) and tensor.dtype == checkpoint.entries[name].dtype
    except Refusal as cause:
        return "refused" if "\n" not in str(cause) else f"two lines: {cause}"
    return "read"


def peak_kilobytes() -> int:
    """Of this program alone: `ru_maxrss` of a child counts what its parent held when it was started."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def run(count: int) -> None:
    """The whole campaign, in a process of its own; prints what went wrong and how often either outcome came."""
    failures, outcomes = [], Counter()
    # Of processor time: on a busy machine the clock on the wall judges the others' work.
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(TimeoutError("too long")))
    for kind in FORMATS:
        with tempfile.TemporaryDirectory() as name:
            path = WRITERS[kind](Path(name))
            original = path.read_bytes()
            assert attempt(path.parent) == "read", kind
            before = peak_kilobytes()
            for seed in range(count):
                path.write_bytes(mutate(original, random.Random(f"{kind} {seed}")))
                signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)
                try:
                    outcome = attempt(path.parent)
                except BaseException as cause:  # noqa: BLE001  (this is what is looked for)
                    outcome = f"{type(cause).__name__}: {cause}"
                signal.setitimer(signal.ITIMER_PROF, 0)
                if outcome not in ("read", "refused"):
                    failures.append((kind, seed, outcome[:300]))
                outcomes[f"{kind} {outcome}"] += 1
            grown = (peak_kilobytes() - before) // 1024
            if grown > MAX_MEGABYTES // 2:
                failures.append((kind, "memory", f"{grown} MB"))
    peak = peak_kilobytes() // 1024
    print(json.dumps({"failures": failures, "outcomes": outcomes, "peak": peak}))


# Formats × 40 mutations by default, × 500 in the long proof.
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_damage_is_read_or_refused(count):
    command = [sys.executable, __file__, str(count)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["failures"] == []
    assert report["peak"] < MAX_MEGABYTES
    for kind in FORMATS:
        assert report["outcomes"].get(f"{kind} refused", 0) > 0


if __name__ == "__main__":
    run(int(sys.argv[1]))
