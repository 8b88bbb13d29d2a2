"""Safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes without gaps."""

import math
import struct
from typing import NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..budget import budget
from ..errors import refusal
from ..records import Json
from .base import Checkpoint, Entry, Rows, are_counts, read_tensor, row_span
from .bytes import ByteSource, check_range, parse_object

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
# Only newer releases of torch know the eight-bit exponent.
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu


class _Item(NamedTuple):
    """Location of one tensor in its file."""

    name: str
    entry: Entry
    start: int
    stop: int


class SafetensorsFile(Checkpoint):
    """One file; reading rows costs those rows."""

    format = "safetensors"

    def __init__(self, source: ByteSource, *, config: Json) -> None:
        self.source = source
        items, self.metadata = _read_header(source)
        self.stored = {item.name: item for item in items}
        entries = {name: item.entry for name, item in self.stored.items()}
        super().__init__(entries, config=config, place=source.name, parts=[source])

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        item = self.stored[name]
        start, shape = row_span(item.entry.shape, item.entry.dtype.itemsize, rows)
        return read_tensor(self.source, item.start + start, item.entry.dtype, shape)


def _read_header(source: ByteSource) -> tuple[list[_Item], dict[str, str]]:
    """The tensors of a file, checked to fill it exactly: no overlap, no gap, nothing outside. Costs the header."""
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > (most := min(budget().json_bytes, source.size - 8)):
        raise refusal(
            f"a header of at most {most} bytes in {source.name}",
            f"a length of {length}",
            "it is truncated, damaged or not a safetensors file; fetch it again",
        )
    header = parse_object(source.read(8, length), name=f"the header of {source.name}")
    notes = header.pop("__metadata__", None)
    notes = notes if isinstance(notes, dict) else {}
    items = [_parse_item(name, value, base=8 + length) for name, value in header.items()]
    _check_cover(source, items, base=8 + length)
    return items, {key: value for key, value in notes.items() if isinstance(value, str)}


def _parse_item(name: str, value: object, *, base: int) -> _Item:
    label = f"tensor {name[:80]!r}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise refusal(f"dtype, shape and data_offsets for {label}", f"{value!r:.80}")
    if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
        raise refusal(f"a known dtype for {label}", f"{value['dtype']!r:.40}", f"known are {', '.join(DTYPES)}")
    shape, offsets = value["shape"], value["data_offsets"]
    if not are_counts(shape) or not are_counts(offsets) or len(offsets) != 2:
        raise refusal(f"whole numbers as shape and two offsets of {label}", f"{shape!r:.80} and {offsets!r:.80}")
    dtype = DTYPES[value["dtype"]]
    needed = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != needed:
        raise refusal(
            f"{needed} bytes for {label} of shape {shape!r:.80} and dtype {value['dtype']}",
            f"{offsets[1] - offsets[0]} bytes",
            "the header is damaged; fetch the file again",
        )
    return _Item(name, Entry(tuple(shape), dtype), base + offsets[0], base + offsets[1])


def _check_cover(source: ByteSource, items: list[_Item], *, base: int) -> None:
    position = base
    for item in sorted(items, key=lambda item: (item.start, item.stop)):
        check_range(source, item.start, item.stop - item.start)
        if item.start != position:
            kind = "an overlap" if item.start < position else "a gap"
            raise refusal(f"tensors one after another in {source.name}", f"{kind} at {item.name[:80]!r}")
        position = item.stop
    if position != source.size:
        remedy = "it is damaged; fetch it again"
        raise refusal(f"{source.name} to end at byte {position}", f"{source.size} bytes", remedy)
