"""HQQ: codes stacked by halves or quarters of the rows of a regrouped weight. W = (q − z)·s, then its own shape."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .weight import Shape, Weight, modules_with, parts_of

PARTS = ("W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "packing", "unpack_view_dtype")
PARTS += ("view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict")
PARTS += ("stores_quant_config", "channel_wise", "optimize", "round_zero")
BITS = {"8bit_u8": 8, "4bit_u8": 4, "2bit_u8": 2, "1bit_u8": 1}


@dataclass(frozen=True)
class HQQ(Weight):
    """Every read costs the whole weight: a stored row holds numbers of several."""

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
        self.check(packing in BITS and self.part_dtype("W_q") == torch.uint8, f"packing {', '.join(BITS)}", packing)
        return BITS[packing]

    def read(self, rows: Rows | None) -> Tensor:
        for role in ("quant_scale", "quant_zero", "view_as_float"):
            flag = self.part(role).flatten().tolist() if role in self.parts else [0]
            self.check(flag == [0], f"no `{role}`", flag)
        codes = self._codes()
        scale, zero = self.part("scale").float(), self.part("zero").float()
        for name, values in (("scale", scale), ("zero", zero)):
            fits = values.dim() == 2 and all(n in (1, m) for n, m in zip(values.shape, codes.shape, strict=True))
            self.check(fits, f"a {name} for the groups of {list(codes.shape)}", [*values.shape])
        whole = ((codes.float() - zero) * scale).reshape(self.shape)
        return whole if rows is None else whole[rows[0] : rows[1]].clone()

    def _codes(self) -> Tensor:
        packed = self.part("W_q")
        self.check(packed.dim() == 2, "a matrix of codes", f"shape {[*packed.shape]}")
        return torch.cat([(packed >> shift) & (2**self.bits - 1) for shift in range(8 - self.bits, -1, -self.bits)])


def find(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    for module in modules_with(store, "W_q"):
        yield HQQ(store, f"{module}.weight", parts_of(store, module, PARTS), settings)
