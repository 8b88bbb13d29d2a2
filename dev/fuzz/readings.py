"""Independent readings: what the bytes of a file say, by code that shares nothing with the package."""

import io
import json
import math
import struct
import zipfile
from pathlib import Path

import numpy as np

WIDTHS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
WIDTHS |= {"U16": "<u2", "U32": "<u4", "U64": "<u8", "BOOL": "?", "BF16": "bf16"}
Numbers = dict[str, np.ndarray]


def safetensors(path: Path) -> Numbers:
    """Tensors whose type numpy has, as float64."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    found = {}
    for name, item in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__" and item["dtype"] in WIDTHS:
            start, stop = (8 + length + offset for offset in item["data_offsets"])
            found[name] = _numbers(data[start:stop], WIDTHS[item["dtype"]]).reshape(item["shape"])
    return found


def stored(path: Path) -> dict[str, tuple]:
    """Type, shape and bytes of every tensor."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    places = {name: [8 + length + offset for offset in item["data_offsets"]] for name, item in header.items()}
    return {name: (item["dtype"], item["shape"], data[slice(*places[name])]) for name, item in header.items()}


def _numbers(data: bytes, kind: str) -> np.ndarray:
    if kind == "bf16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(data, kind).astype(np.float64)


def sharded(folder: Path) -> Numbers:
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: safetensors(folder / file) for file in set(places.values())}
    unnamed = {name: numbers for file in files.values() for name, numbers in file.items()}
    return unnamed | {name: files[file][name] for name, file in places.items() if name in files[file]}


def torch_file(path: Path) -> Numbers:
    """By torch's own loader, which admits tensors only."""
    import torch

    tree = torch.load(without_directories(path), weights_only=True)
    tree = tree["model"] if isinstance(tree, dict) and isinstance(tree.get("model"), dict) else tree
    tensors = {name: value for name, value in tree.items() if isinstance(value, torch.Tensor)}
    return {name: tensor.double().numpy() for name, tensor in tensors.items() if not tensor.is_complex()}


def without_directories(path: Path) -> Path | io.BytesIO:
    """The archive with no entry marked as a directory: of such a one torch gives whatever lies in memory."""
    if not zipfile.is_zipfile(path):
        return path
    with zipfile.ZipFile(path) as archive:
        if not any(entry.external_attr & 0x10 for entry in archive.infolist()):
            return path
        whole = io.BytesIO()
        with zipfile.ZipFile(whole, "w") as plain:
            for entry in archive.infolist():
                plain.writestr(entry.filename, archive.read(entry.filename))
    whole.seek(0)
    return whole


def gguf(path: Path) -> Numbers:
    """The stored tensors of kinds F32, F16 and Q8_0, flat and sorted: converters move rows, never numbers."""
    data = path.read_bytes()
    position = 24
    num_tensors, num_settings = struct.unpack("<QQ", data[8:24])
    alignment = 32
    for _ in range(num_settings):
        key, position = _text(data, position)
        kind = struct.unpack_from("<I", data, position)[0]
        value, position = _setting(data, position + 4, kind)
        alignment = value if key == "general.alignment" else alignment
    infos = []
    for _ in range(num_tensors):
        name, position = _text(data, position)
        (num_dimensions,) = struct.unpack_from("<I", data, position)
        shape = struct.unpack_from(f"<{num_dimensions}Q", data, position + 4)
        kind, offset = struct.unpack_from("<IQ", data, position + 4 + 8 * num_dimensions)
        position += 16 + 8 * num_dimensions
        infos.append((name, math.prod(shape), kind, offset))
    base = -(-position // alignment) * alignment
    return {
        name: np.sort(_unpacked(data, base + offset, kind, count))
        for name, count, kind, offset in infos
        if kind in (0, 1, 8)
    }


def _text(data: bytes, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    return data[position + 8 : position + 8 + length].decode(), position + 8 + length


def _setting(data: bytes, position: int, kind: int):
    if kind == 8:
        return _text(data, position)
    if kind == 9:
        inner, count = struct.unpack_from("<IQ", data, position)
        position += 12
        for _ in range(count):
            _, position = _setting(data, position, inner)
        return None, position
    code = "BbHhIif?__Qqd"[kind]
    return struct.unpack_from("<" + code, data, position)[0], position + struct.calcsize("<" + code)


def _unpacked(data: bytes, start: int, kind: int, count: int) -> np.ndarray:
    if kind in (0, 1):
        return np.frombuffer(data, ("<f4", "<f2")[kind], count, start).astype(np.float64)
    blocks = np.frombuffer(data, np.uint8, count // 32 * 34, start).reshape(-1, 34)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return (scales * blocks[:, 2:].copy().view("i1").astype(np.float32)).astype(np.float64).ravel()


def moments(query: np.ndarray, key: np.ndarray) -> tuple[float, float, float, float]:
    """tr W, tr W², ‖W‖² of the materialised W = QᵀK, and ‖Q‖²‖K‖², by which sums of single precision may be off."""
    whole = query.T @ key
    sizes = np.sum(query**2) * np.sum(key**2)
    return float(np.trace(whole)), float(np.sum(whole * whole.T)), float(np.sum(whole**2)), float(sizes)


def llama_moments(
    config: dict, tensors: Numbers, *, is_raw: bool = False
) -> dict[tuple[int, int], tuple[float, float, float, float]]:
    """`moments` of every head of a llama, the gain of its norm folded in unless raw."""
    heads = config["num_attention_heads"]
    keys = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    found = {}
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        if place + "self_attn.q_proj.weight" not in tensors:
            continue
        query, key, gain = (
            tensors[place + name + ".weight"] for name in ("self_attn.q_proj", "self_attn.k_proj", "input_layernorm")
        )
        gain = 1.0 if is_raw else gain
        for head in range(heads):
            rows, of_key = slice(head * size, (head + 1) * size), head // (heads // keys)
            found[layer, head] = moments(query[rows] * gain, key[of_key * size : (of_key + 1) * size] * gain)
    return found


def layout_moments(row: dict, tensors: Numbers, layer: int, head: int) -> tuple[float, float, float, float]:
    """`moments` of one head of a layout's row, from the names and numbers that the row gives."""

    def tensor(template: str) -> np.ndarray:
        name = template.replace("{layer}", str(layer))
        (found,) = [one for key, one in tensors.items() if f".{key}".removesuffix(".weight").endswith(f".{name}")]
        return found

    query, key = tensor(row["query"]), tensor(row["key"])
    heads = row["heads"]
    keys = row.get("key_heads") or heads
    size = row.get("d_head") or len(query) // heads
    norm = row.get("input_norm") or {}
    gain = tensor(norm["name"]) if norm.get("name") else 1.0
    of_key = head // (heads // keys)
    left, right = (query[head * size : (head + 1) * size] * gain, key[of_key * size : (of_key + 1) * size] * gain)
    if norm.get("kind") == "layer":
        left, right = left - left.mean(1, keepdims=True), right - right.mean(1, keepdims=True)
    return moments(left, right)
