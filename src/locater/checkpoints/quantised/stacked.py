"""Codes of a weight that was flattened or regrouped before it was packed: HQQ, quanto and bitsandbytes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import bad_value
from ...records import JsonMapping
from ..base import Checkpoint, Rows
from ..bytes import parse_object
from .declared import Declared
from .weight import REMEDY, QuantisedWeight, Shape, find_by, parts_of, stated_count, word


@dataclass(frozen=True)
class Stacked(QuantisedWeight):
    """Halves or quarters of the stack of all groups share bytes, so that every read costs the whole weight."""

    def read(self, rows: Rows | None) -> Tensor:
        whole = self.groups().reshape(self.shape)
        return whole if rows is None else whole[rows[0] : rows[1]].clone()

    def groups(self) -> Tensor:
        """The numbers, group by group."""
        raise NotImplementedError

    def unstacked(self, role: str, shifts: range) -> Tensor:
        """Codes whose bits lie at these places of each byte, one part of the stack after the other."""
        packed = self.codes(role, torch.uint8)
        self.check(packed.dim() == 2, "a matrix of codes", f"shape {[*packed.shape]}")
        return torch.cat([(packed >> shift) & (2 ** abs(shifts.step) - 1) for shift in shifts])


# ------------------------------------------------------------------------------------------------------------- HQQ
HQQ_PARTS = (
    "W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "unpack_view_dtype", "view_as_float",
    "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero",
)  # fmt: skip
HQQ_BITS = {"8bit_u8": 8, "4bit_u8": 4, "2bit_u8": 2, "1bit_u8": 1}


@dataclass(frozen=True)
class HQQ(Stacked):
    """W = (q − z)·s, then its own shape; the highest bits come first."""

    @cached_property
    def shape(self) -> Shape:  # type: ignore  # read once
        self.check_shape("shape", (2,))
        shape = tuple(self.codes("shape").tolist())
        stored = math.prod(self.part_shape("W_q")) * 8 // self.bits
        fits = min(shape) > 0 and math.prod(shape) == stored
        self.check(fits, f"a shape of {stored} numbers", [*shape])
        return shape

    @cached_property
    def bits(self) -> int:
        packing = bytes(code & 127 for code in self.codes("packing").flatten()[:20].tolist()).decode()
        fits = packing in HQQ_BITS and self.part_dtype("W_q") == torch.uint8
        self.check(fits, f"packing {', '.join(HQQ_BITS)}", packing)
        return HQQ_BITS[packing]

    def groups(self) -> Tensor:
        for role in ("quant_scale", "quant_zero", "view_as_float"):
            flag = self.part(role).flatten().tolist() if role in self.parts else [0]
            self.check(flag == [0], f"no `{role}`", flag)
        codes = self.unstacked("W_q", range(8 - self.bits, -1, -self.bits))
        scale, zero = self.part("scale").float(), self.part("zero").float()
        for name, values in (("scale", scale), ("zero", zero)):
            fits = values.dim() == 2 and all(n in (1, m) for n, m in zip(values.shape, codes.shape, strict=True))
            self.check(fits, f"a {name} for the groups of {list(codes.shape)}", [*values.shape])
        return (codes.float() - zero) * scale


find_hqq = find_by(HQQ, *HQQ_PARTS)


# ---------------------------------------------------------------------------------------------------------- quanto
QUANTO_PARTS = ("weight._scale", "weight._shift", "input_scale", "output_scale")
QUANTO_BITS = {"int4": 4, "qint4": 4, "int2": 2, "qint2": 2}


@dataclass(frozen=True)
class QuantoBytes(Declared):
    """int8 and FP8, one scale per row or tensor."""

    NUMBERS = "weight._data"
    SCALE = "weight._scale"


@dataclass(frozen=True)
class QuantoStacked(Stacked):
    """int4 and int2: W = s·q − shift, groups of a row one below the other; the lowest bits come first."""

    @property
    def bits(self) -> int:
        bits = QUANTO_BITS.get(word(self.settings, "weights"))
        self.check(
            bits is not None, "`weights` int4 or int2 in quantization_config", repr(self.settings.get("weights"))
        )
        return bits or 0

    @property
    def shape(self) -> Shape:
        """Only groups are stored: the inputs are taken to be the model's width, as they are wherever that is read."""
        packed, scales = self.matrix_shape("weight._data._data"), self.matrix_shape("weight._scale")
        num_groups, size = scales[0], packed[1]
        stored = math.prod(packed) * 8 // self.bits
        self.check(stored == num_groups * size, f"{num_groups} groups of {size}", f"{stored} numbers")
        inputs = self.settings.get("hidden_size")
        if type(inputs) is not int or inputs <= size or inputs % size or num_groups * size % inputs:
            return num_groups, size
        return num_groups * size // inputs, inputs

    def groups(self) -> Tensor:
        for role in ("weight._scale", "weight._shift"):
            self.check_shape(role, (self.part_size("weight._scale"), 1))
        codes = self.unstacked("weight._data._data", range(0, 8, self.bits))
        scale, shift = self.part("weight._scale").float(), self.part("weight._shift")
        return scale * codes - shift.float() if shift.is_floating_point() else scale * (codes.int() - shift.int())


find_quanto = (
    find_by(QuantoBytes, "weight._data", *QUANTO_PARTS),
    find_by(QuantoStacked, "weight._data._data", *QUANTO_PARTS),
)


# ---------------------------------------------------------------------------------------------------- bitsandbytes
STATE = "weight.quant_state.bitsandbytes__"
FOUR_BIT_PARTS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")


@dataclass(frozen=True)
class BitsAndBytes4(QuantisedWeight):
    """NF4 and FP4: codes into a table of 16, two per byte, the upper half first; W = table[q]·max of the block.

    Blocks are of the flat tensor; their maxima may be quantised in turn.
    """

    @cached_property
    def state(self) -> JsonMapping:
        data = bytes(self.codes("state", torch.uint8).flatten().tolist())
        return parse_object(data, name=f"the state of `{self.name[:120]}`")

    @cached_property
    def shape(self) -> Shape:  # type: ignore  # read once
        shape = self.state.get("shape")
        fine = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 2**31 for n in shape)
        self.check(fine, "the shape of a matrix in its state", f"{shape!r:.60}")
        assert isinstance(shape, list)
        stored = math.prod(self.part_shape("weight"))
        self.check(2 * stored == math.prod(shape), f"{math.prod(shape) // 2} bytes of codes", stored)
        return tuple(shape)

    def read(self, rows: Rows | None) -> Tensor:
        num_rows, width = self.shape
        start, stop = rows or (0, num_rows)
        size = stated_count(self.state, "blocksize")
        maxima = self._read_maxima(size)
        first, last = start * width, stop * width  # a byte may hold the end of one row and the next's
        octets = self.codes("weight", torch.uint8, rows=(first // 2, -(-last // 2))).flatten()
        codes = torch.stack([octets >> 4, octets & 15], dim=-1).flatten()[first % 2 :][: last - first]
        self.check_shape("weight.quant_map", (16,))
        numbers = self.part("weight.quant_map").float()[codes.long()]
        return (numbers * maxima[torch.arange(first, last) // size]).reshape(stop - start, width)

    def _read_maxima(self, size: int) -> Tensor:
        """The largest number of every block, which may be stored as codes of 8 bits itself."""
        count = -(-math.prod(self.shape) // size)
        self.check_shape("weight.absmax", (count,))
        maxima = self.part("weight.absmax")
        if "weight.nested_absmax" not in self.parts:
            self.check(maxima.is_floating_point(), "maxima as numbers", maxima.dtype)
            return maxima.float()
        inner = stated_count(self.state, "nested_blocksize")
        offset = self.state.get("nested_offset")
        self.check(isinstance(offset, float | int) and maxima.dtype == torch.uint8, "nested maxima", f"{offset!r:.40}")
        assert isinstance(offset, float | int)
        self.check_shape("weight.nested_quant_map", (256,))
        self.check_shape("weight.nested_absmax", (-(-count // inner),))
        numbers = self.part("weight.nested_quant_map").float()[maxima.long()]
        return numbers * self.part("weight.nested_absmax").float()[torch.arange(count) // inner] + offset


@dataclass(frozen=True)
class BitsAndBytes8(Declared):
    """`SCB` holds the largest of each row: W = q·SCB/127."""

    SCALE = "SCB"

    def scale(self) -> Tensor:
        self.check_shape("SCB", (self.shape[0],))
        if "weight_format" in self.parts:
            order = self.part("weight_format").flatten().tolist()
            self.check(order == [0], "rows one after another (weight_format 0)", f"{order!r:.40}")
        return super().scale() / 127


def find_bitsandbytes(store: Checkpoint, settings: JsonMapping) -> Iterator[QuantisedWeight]:
    for name in store.names:
        module, found, kind = name.partition(f".{STATE}")
        if found:
            parts = parts_of(store, module, FOUR_BIT_PARTS) | {"state": name}
            if kind not in ("nf4", "fp4"):
                raise bad_value(f"NF4 or FP4 in `{module[:120]}.weight`", repr(kind[:40]), REMEDY)
            yield BitsAndBytes4(store, f"{module}.weight", parts, settings)


find_bitsandbytes_8 = find_by(BitsAndBytes8, "SCB", "weight", "weight_format")
