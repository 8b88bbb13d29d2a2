"""bitsandbytes: NF4 and FP4 in blocks of a flat tensor, with maxima that may be quantised in turn; and int8 by rows."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import refusal
from ...records import JsonMapping
from ..base import Checkpoint, Rows
from ..document import parse_object
from .weight import REMEDY, Shape, Weight, modules_with, number, parts_of

STATE = "weight.quant_state.bitsandbytes__"
PARTS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")


@dataclass(frozen=True)
class FourBits(Weight):
    """Codes into a table of 16, two per byte, the upper half first; W = table[q]·max of the block."""

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
        size = number(self.state, "blocksize")
        maxima = self._maxima(size)
        first, last = (
            start * width,
            stop * width,
        )  # of the flat tensor; a byte may hold the end of one row and the next's
        octets = self.codes("weight", torch.uint8, rows=(first // 2, -(-last // 2))).flatten()
        codes = torch.stack([octets >> 4, octets & 15], dim=-1).flatten()[first % 2 :][: last - first]
        self.check_shape("weight.quant_map", (16,))
        numbers = self.part("weight.quant_map").float()[codes.long()]
        return (numbers * maxima[torch.arange(first, last) // size]).reshape(stop - start, width)

    def _maxima(self, size: int) -> Tensor:
        count = -(-math.prod(self.shape) // size)
        self.check_shape("weight.absmax", (count,))
        maxima = self.part("weight.absmax")
        if "weight.nested_absmax" not in self.parts:
            self.check(maxima.is_floating_point(), "maxima as numbers", maxima.dtype)
            return maxima.float()
        inner = number(self.state, "nested_blocksize")
        offset = self.state.get("nested_offset")
        self.check(isinstance(offset, float | int) and maxima.dtype == torch.uint8, "nested maxima", f"{offset!r:.40}")
        assert isinstance(offset, float | int)
        self.check_shape("weight.nested_quant_map", (256,))
        self.check_shape("weight.nested_absmax", (-(-count // inner),))
        numbers = self.part("weight.nested_quant_map").float()[maxima.long()]
        return numbers * self.part("weight.nested_absmax").float()[torch.arange(count) // inner] + offset


@dataclass(frozen=True)
class EightBits(Weight):
    """`SCB` holds the largest of each row: W = q·SCB/127."""

    @property
    def shape(self) -> Shape:
        return self.part_shape("weight")

    def read(self, rows: Rows | None) -> Tensor:
        self.check(len(self.shape) == 2, "a matrix", f"shape {[*self.shape]}")
        self.check_shape("SCB", (self.shape[0],))
        if "weight_format" in self.parts:
            order = self.part("weight_format").flatten().tolist()
            self.check(order == [0], "rows one after another (weight_format 0)", f"{order!r:.40}")
        return self.codes("weight", torch.int8, rows=rows).float() * self.part("SCB", rows).float()[:, None] / 127


def find(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    for name in store.names:
        module, found, kind = name.partition(f".{STATE}")
        if found:
            parts = parts_of(store, module, PARTS) | {"state": name}
            if kind not in ("nf4", "fp4"):
                raise refusal(f"NF4 or FP4 in `{module[:120]}.weight`", repr(kind[:40]), REMEDY)
            yield FourBits(store, f"{module}.weight", parts, settings)
    for module in modules_with(store, "SCB"):
        parts = parts_of(store, module, ("weight", "SCB", "weight_format"))
        yield EightBits(store, f"{module}.weight", parts, settings)
