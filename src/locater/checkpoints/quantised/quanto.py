"""quanto: int8, int4, int2 and FP8 weights as the tensors inside its own. W = s·q − shift by row or group."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .floating import EIGHT_BITS
from .weight import Shape, Weight, modules_with, parts_of, word

PARTS = ("weight._data", "weight._data._data", "weight._scale", "weight._shift", "input_scale", "output_scale")
BITS = {"int4": 4, "qint4": 4, "int2": 2, "qint2": 2}


@dataclass(frozen=True)
class Bytes(Weight):
    """A number per byte, one scale per row."""

    @property
    def shape(self) -> Shape:
        return self.part_shape("weight._data")

    def read(self, rows: Rows | None) -> Tensor:
        self.check(len(self.shape) == 2, "a matrix", f"shape {[*self.shape]}")
        self.check_shape("weight._scale", (self.shape[0], 1), ())
        scale = self.part("weight._scale").float()
        numbers = self.part("weight._data", rows)
        self.check(numbers.dtype in EIGHT_BITS or str(numbers.dtype) == "torch.int8", "eight bits", numbers.dtype)
        return numbers.float() * (scale if rows is None or scale.dim() == 0 else scale[rows[0] : rows[1]])


@dataclass(frozen=True)
class Packed(Weight):
    """Groups of a row, one below the other; halves or quarters of the stack share bytes, lowest bits first."""

    @property
    def bits(self) -> int:
        bits = BITS.get(word(self.settings, "weights"))
        self.check(bits is not None, "`weights` int4 or int2 in quantization_config", self.settings.get("weights"))
        return bits or 0

    @property
    def shape(self) -> Shape:
        """Only groups are stored: the inputs are taken to be the model's width, as they are wherever that is read."""
        packed, scales = self.part_shape("weight._data._data"), self.part_shape("weight._scale")
        self.check(len(packed) == len(scales) == 2, "a matrix of codes and one of scales", f"shape {[*packed]}")
        num_groups, size = scales[0], packed[1]
        stored = math.prod(self.part_shape("weight._data._data")) * 8 // self.bits
        self.check(stored == num_groups * size, f"{num_groups} groups of {size}", f"{stored} numbers")
        inputs = self.settings.get("hidden_size")
        if type(inputs) is not int or inputs <= size or inputs % size or num_groups * size % inputs:
            return num_groups, size
        return num_groups * size // inputs, inputs

    def read(self, rows: Rows | None) -> Tensor:
        num_groups = self.part_size("weight._scale")
        for role in ("weight._scale", "weight._shift"):
            self.check_shape(role, (num_groups, 1))
        packed = self.codes("weight._data._data", torch.uint8)
        scale, shift = (self.part(role) for role in PARTS[2:4])
        codes = torch.cat([(packed >> place) & (2**self.bits - 1) for place in range(0, 8, self.bits)])
        if shift.is_floating_point():
            whole = (scale.float() * codes - shift.float()).reshape(self.shape)
        else:
            whole = (scale.float() * (codes.int() - shift.int())).reshape(self.shape)
        return whole if rows is None else whole[rows[0] : rows[1]].clone()


def find(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    for module in modules_with(store, "weight._data"):
        yield Bytes(store, f"{module}.weight", parts_of(store, module, PARTS), settings)
    for module in modules_with(store, "weight._data._data"):
        yield Packed(store, f"{module}.weight", parts_of(store, module, PARTS), settings)
