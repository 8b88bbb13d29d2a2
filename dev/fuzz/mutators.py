"""Ways to spoil a file: its bytes, its values, the types and names in a document, the tree around it.

Every mutator takes a `random.Random` and is a function of it alone, so a case is a name and a number.
"""

import contextlib
import copy
import json
import pickle
import pickletools
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SCRIPT = "<script>alert(1)</script>"
EXTREMES = [struct.pack("<Q", value) for value in (0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)]
SNIPPETS = [b"}", b'"', b"9999999999", b"-1", b"../x", b"\xff\xff", b"[[", b"NaN", b"1e999", b"\x00", b"null", b"{}"]
WORDS = [
    "",
    "x",
    "-1",
    "0",
    "inf",
    "../../etc",
    "%2e%2e/x",
    "a" * 3000,
    "\x1b[31mred\n\u202etxt",
    SCRIPT,
    "[/x]",
    "{layer:1000000000}",
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    3,
    7,
    10**9,
    2**63,
    -(2**70),
    10**400,
    0.0,
    -0.5,
    0.3,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
]
ODD = [None, True, False, [], {}, [[]], [1, 2, 3], {"a": 1}, {"rope_type": "yarn"}, [None], ["x"], [1e300] * 4]
SCALINGS: list[Any] = [
    {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 16, "low_freq_factor": 1,
     "high_freq_factor": high, "short_factor": short, "long_factor": short, "beta_fast": fast}
    for kind in ("linear", "dynamic", "yarn", "llama3", "longrope", "su", "mrope", "proportional", "unheard", 3, None)
    for factor in (2.0, 0, "x", float("inf"))
    for high, short, fast in ((4, [1.0, 2.0], 32), (1, [1.0], 0), ("y", "abc", None), (0.5, [], -3), (2, [{}], 9e307))
]  # fmt: skip


def spoil_bytes(data: bytes, chance: random.Random) -> bytes:
    """One to four damages; headers, which are most delicate, are hit most."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        # Headers stand first, the directory of an archive last.
        place = chance.choice([chance.randrange(min(1500, len(result) or 1)), chance.randrange(len(result) or 1)])
        place = len(result) - 1 - place if result and chance.random() < 0.2 else place
        kind = chance.randrange(7)
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
        elif kind == 5 and result:
            result[place] ^= 1 << chance.randrange(8)
        else:
            result[place : place + 4] = chance.choice(SNIPPETS)
    return bytes(result)


def odd_value(chance: random.Random, old: object) -> Any:
    """Something else: near the old value, far from it, or of another kind."""
    kind = chance.randrange(6)
    if kind == 0 and isinstance(old, int | float) and not isinstance(old, bool) and abs(old) < 1e300:
        return chance.choice([old + 1, old - 1, old * 2, -old, float(old), str(old), old // 2 if old else 1])
    if kind == 1 and isinstance(old, str):
        return chance.choice([old.upper(), old + "x", old[:-1], old * 50])
    if kind == 2 and isinstance(old, list):
        return chance.choice([old[:-1], old + old, old[::-1], [old], (old or [1])[0]])
    return copy.deepcopy(chance.choice([chance.choice(WORDS), chance.choice(NUMBERS), chance.choice(ODD)]))


def places_in(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    pending, found = [document], []
    while pending:
        node = pending.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in list(items)[:200]:
            found.append((node, key))
            pending.append(value)
    return found


def spoil_document(document: Any, chance: random.Random) -> str:
    """One to three values replaced, removed, doubled or renamed, in place; which, in words."""
    told = []
    for _ in range(chance.randint(1, 3)):
        places = places_in(document)
        if not places:
            break
        node, key = chance.choice(places)
        kind = chance.randrange(8)
        told.append(f"{kind}:{key!s:.40}")
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, dict):
            node[chance.choice(WORDS)] = node.pop(key)
        elif kind == 2:
            other, source = chance.choice(places)
            if isinstance(other, dict) and source in other:
                node[key] = copy.deepcopy(other[source])
        else:
            node[key] = odd_value(chance, node[key])
    return " ".join(told)


def write_document(document: Any, path: Path) -> None:
    """As JSON; numbers beyond it (NaN, infinity) as Python and JavaScript write them."""
    path.write_text(json.dumps(document), encoding="utf-8")


def spoil_json(path: Path, chance: random.Random, *, extra: Callable[[Any, random.Random], str] | None = None) -> str:
    """A JSON file, as a document or, now and then, as bytes."""
    if chance.random() < 0.15:
        path.write_bytes(spoil_bytes(path.read_bytes(), chance))
        return f"bytes of {path.name}"
    document = json.loads(path.read_text(encoding="utf-8"))
    told = extra(document, chance) if extra and chance.random() < 0.3 else spoil_document(document, chance)
    write_document(document, path)
    return f"{path.name} {told}"


def spoil_header(path: Path, chance: random.Random) -> str:
    """The JSON header of a safetensors file, its length kept true."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    told = spoil_document(header, chance)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"header {told}"


def spoil_tensor(tensor: torch.Tensor, chance: random.Random) -> tuple[torch.Tensor, str]:
    """Other numbers, another type, another shape."""
    kind = chance.randrange(12)
    bad = chance.choice([float("nan"), float("inf"), -float("inf"), 1e38, 1e-40, 0.0, 65504.0])
    if kind < 3 and tensor.numel() and tensor.is_floating_point():
        changed = tensor.clone()
        changed.view(-1)[chance.randrange(tensor.numel())] = bad
        return changed, f"one {bad}"
    if kind == 3:
        return torch.full_like(tensor.float(), bad), f"all {bad}"
    if kind == 4:
        return tensor.to(chance.choice([torch.float16, torch.bfloat16, torch.float64])), "type"
    if kind == 5:
        return tensor.float().to(chance.choice([torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])), "codes"
    if kind == 6:
        return tensor.T.contiguous() if tensor.dim() == 2 else tensor[None], "turned"
    if kind == 7:
        return torch.cat([tensor, tensor]) if tensor.dim() else tensor[None], "doubled"
    if kind == 8:
        return tensor[: len(tensor) // 2].clone() if tensor.dim() else tensor, "halved"
    if kind == 9:
        return tensor.reshape(-1), "flat"
    if kind == 10:
        return torch.zeros(chance.choice([(), (0,), (0, 16), (1, 1, 1), (1,)])), "empty"
    return tensor.float() * chance.choice([1e20, 1e-30, -1.0, 3.0]), "scaled"


def spoil_tensors(tensors: dict[str, torch.Tensor], chance: random.Random) -> tuple[str, str]:
    """One tensor changed, dropped, renamed, doubled or added, in place: its name and what was done."""
    name = chance.choice(sorted(tensors))
    kind = chance.randrange(10)
    if kind == 0:
        del tensors[name]
        return name, "dropped"
    if kind == 1:
        tensors[name.replace(".0.", ".7.") if chance.random() < 0.5 else name + "_old"] = tensors.pop(name)
        return name, "renamed"
    if kind == 2:
        tensors[name.rpartition(".")[0] + chance.choice([".weight_scale", ".gamma", ".bias", ".sinks"])] = torch.rand(4)
        return name, "beside"
    tensors[name], told = spoil_tensor(tensors[name], chance)
    return name, told


def spoil_pickle(data: bytes, chance: random.Random) -> bytes:
    """Opcodes dropped, doubled or exchanged, or their numbers and words replaced."""
    codes = list(pickletools.genops(data))
    ends = [position for *_, position in codes[1:]] + [len(data)]
    parts = [data[position:end] for (*_, position), end in zip(codes, ends, strict=True)]
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(parts))
        kind = chance.randrange(5)
        if kind == 0:
            parts[place] = b""
        elif kind == 1:
            parts.insert(place, chance.choice(parts))
        elif kind == 2:
            parts[place] = pickle.BININT + struct.pack("<i", chance.choice([-1, 0, 1, 7, 2**31 - 1]))
        elif kind == 3:
            parts[place] = pickle.dumps(chance.choice([*NUMBERS, *WORDS[:4], None, ()]), 2)[2:-1]
        else:
            parts[place] = spoil_bytes(parts[place], chance) if parts[place] else b"("
    return b"".join(parts)


def spoil_tree(folder: Path, chance: random.Random) -> str:
    """Files removed, renamed, emptied, doubled, or turned into something that is no file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = chance.choice(files)
    kind = chance.randrange(8)
    told = f"{kind}:{path.name}"
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.rename(path.with_suffix(chance.choice([".bin", ".safetensors", ".gguf", ".json", ".pt", ""])))
    elif kind == 2:
        path.write_bytes(b"")
    elif kind == 3:
        with contextlib.suppress(shutil.SameFileError):
            shutil.copy(path, path.with_name(chance.choice(["model.safetensors", "config.json", "x.pt", ".metadata"])))
    elif kind == 4:
        path.unlink()
        path.mkdir()
    elif kind == 5:
        path.unlink()
        path.symlink_to(path.name if chance.random() < 0.5 else "nowhere")
    elif kind == 6:
        other = chance.choice(files)
        data = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        path.write_bytes(path.read_bytes() + b"\0" * chance.choice([1, 8, 4096]))
    return told
