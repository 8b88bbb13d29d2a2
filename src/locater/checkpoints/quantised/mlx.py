"""MLX: codes packed along the inputs, W = s·q + b by group; its micro-scaled kinds have exponents for scales."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .floating import FOUR_BITS
from .weight import Shape, Weight, exponents, grid, modules_with, number, parts_of, spread_over, unpack_bits, word

BITS = (2, 3, 4, 5, 6, 8)
# Bits and group of the kinds that fix them.
FIXED = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


@dataclass(frozen=True)
class MLX(Weight):
    """`settings` are those of the module: the config may give a module its own."""

    @property
    def mode(self) -> str:
        mode = word(self.settings, "mode", "affine")
        self.check(mode == "affine" or mode in FIXED, f"the mode affine, {', '.join(FIXED)}", repr(mode[:40]))
        return mode

    @property
    def bits(self) -> int:
        bits = number(self.settings, "bits", FIXED.get(self.mode, (None,))[0])
        self.check(bits == FIXED[self.mode][0] if self.mode in FIXED else bits in BITS, "a number of bits", bits)
        return bits

    @property
    def shape(self) -> Shape:
        shape = self.part_shape("weight")
        self.check(len(shape) == 2, "a matrix", f"shape {[*shape]}")
        return shape[0], shape[1] * 32 // self.bits

    def read(self, rows: Rows | None) -> Tensor:
        block = (1, number(self.settings, "group_size", FIXED.get(self.mode, (0, None))[1]))
        self.check(self.mode == "affine" or block[1] == FIXED[self.mode][1], "the group of its kind", block[1])
        self.check_shape("scales", grid(self.shape, block))
        codes = unpack_bits(self.part("weight", rows), self.bits)
        scales = self._scales()
        scaled = self._numbers(codes) * spread_over(scales, self.shape, block, rows)
        if self.mode != "affine":
            self.check("biases" not in self.parts, "no biases", "some")
            return scaled
        self.check_shape("biases", grid(self.shape, block))
        return scaled + spread_over(self.part("biases").float(), self.shape, block, rows)

    def _scales(self) -> Tensor:
        scales = self.part("scales")
        is_byte = scales.dtype == torch.uint8
        self.check(is_byte == (self.mode in FIXED), f"scales of the mode {self.mode}", scales.dtype)
        return scales.view(torch.float8_e4m3fn).float() if self.mode == "nvfp4" else exponents(scales)

    def _numbers(self, codes: Tensor) -> Tensor:
        if self.mode == "affine":
            return codes.float()
        if self.mode == "mxfp8":
            return codes.contiguous().view(torch.float8_e4m3fn).float()
        return torch.tensor([sign * value for sign in (1, -1) for value in FOUR_BITS])[codes.long()]


def find(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    for module in modules_with(store, "weight"):
        if store.entries[f"{module}.weight"].dtype == torch.uint32 and f"{module}.scales" in store.entries:
            own = settings.get(module)
            parts = parts_of(store, module, ("weight", "scales", "biases"))
            yield MLX(store, f"{module}.weight", parts, {**settings, **own} if isinstance(own, Mapping) else settings)
