"""compressed-tensors: whole-number weights, packed or one per byte. W = s·(q − z) by tensor, row, group or block.

Its floating-point kinds are those of `floating`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .floating import declared_blocks, find_eight_bits, find_four_bits, weight_arguments
from .weight import Shape, Weight, grid, modules_with, parts_of, spread_over, unpack_bits

PARTS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
BITS = (2, 4, 8)


@dataclass(frozen=True)
class Whole(Weight):
    """Signed codes; packed ones are stored with 2^(bits − 1) added, zero points along the outputs."""

    @property
    def is_packed(self) -> bool:
        return "weight_packed" in self.parts

    @property
    def shape(self) -> Shape:
        if not self.is_packed:
            return self.part_shape("weight")
        self.check_shape("weight_shape", (2,))
        shape = tuple(self.codes("weight_shape").tolist())
        fits = all(0 < size < 2**31 for size in shape) and self.part_size("weight_packed") == shape[0]
        self.check(fits, f"{self.part_size('weight_packed')} rows in `weight_shape`", [*shape])
        return shape

    @property
    def bits(self) -> int:
        """Bits per number: among those that the config declares, the one that the stored width allows."""
        width, stored = self.shape[1], self.part_size("weight_packed", 1)
        said = [arguments.get("num_bits") for arguments in weight_arguments(self.settings)]
        declared = {bits for bits in BITS if bits in said}
        fitting = [bits for bits in declared if math.ceil(width * bits / 32) == stored]
        self.check(len(fitting) == 1, f"{width} codes of {sorted(declared)} bits", f"{stored} words a row")
        return fitting[0]

    def read(self, rows: Rows | None) -> Tensor:
        shape = self.shape
        self.check(len(shape) == 2, "a matrix", f"shape {[*shape]}")
        block = self._block(shape)
        counts = grid(shape, block)
        scale = spread(self.part("weight_scale").float().reshape(counts), self, block, rows)
        codes = self._codes(rows)
        kinds = {bool(arguments.get("symmetric", True)) for arguments in weight_arguments(self.settings)}
        self.check("weight_zero_point" in self.parts or True in kinds, "`weight_zero_point`, as declared")
        if "weight_zero_point" in self.parts:
            zeros = self._zeros(counts)  # some writers store zeros where there are none
            self.check(False in kinds or not bool(zeros.any()), "no zero points, as declared", "some")
            codes = codes - spread(zeros, self, block, rows)
        return codes * scale

    def _codes(self, rows: Rows | None) -> Tensor:
        if not self.is_packed:
            return self.part("weight", rows).float()
        codes = unpack_bits(self.part("weight_packed", rows), self.bits)
        return codes[:, : self.shape[1]].float() - 2 ** (self.bits - 1)

    def _zeros(self, counts: Shape) -> Tensor:
        zeros = self.part("weight_zero_point")
        if self.is_packed and zeros.dtype == torch.int32:
            self.check_shape("weight_zero_point", (math.ceil(counts[0] * self.bits / 32), counts[1]))
            return (unpack_bits(zeros.T, self.bits)[:, : counts[0]].T).float() - 2 ** (self.bits - 1)
        self.check(zeros.numel() == math.prod(counts), f"{math.prod(counts)} zero points", zeros.numel())
        return zeros.float().reshape(counts)

    def _block(self, shape: Shape) -> Shape:
        stored = self.part_shape("weight_scale")
        blocks = {tuple(map(min, zip(block, shape, strict=True))) for block in declared_blocks(self.settings)}
        fitting = [block for block in blocks if _matches(stored, grid(shape, block))]
        self.check(len(fitting) == 1, "a scale of the shape that the config declares", f"shape {[*stored]}")
        return fitting[0]


def spread(scale: Tensor, weight: Whole, block: Shape, rows: Rows | None) -> Tensor:
    """One number per weight; `weight_g_idx` says the group of each input where calibration reordered them."""
    if "weight_g_idx" not in weight.parts:
        return spread_over(scale, weight.shape, block, rows)
    weight.check(block[0] == 1, "groups along the rows with `weight_g_idx`", f"blocks of {block[0]} rows")
    weight.check_shape("weight_g_idx", (weight.shape[1],))
    groups = weight.codes("weight_g_idx").long()
    if bool((groups == -1).all()):  # as it is stored where nothing was reordered
        return spread_over(scale, weight.shape, block, rows)
    inside = bool(((groups >= 0) & (groups < scale.shape[1])).all())
    weight.check(inside, f"groups below {scale.shape[1]} in `weight_g_idx`", "one outside")
    return (scale if rows is None else scale[rows[0] : rows[1]])[:, groups]


def find(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    yield from find_eight_bits(store, settings)
    four_bits = {weight.name: weight for weight in find_four_bits(store, settings)}
    yield from four_bits.values()
    for ending, dtype in (("weight_packed", torch.int32), ("weight", torch.int8)):
        for module in modules_with(store, ending):
            if store.entries[f"{module}.{ending}"].dtype == dtype:
                parts = parts_of(store, module, tuple({ending, *PARTS[2:]}))
                yield Whole(store, f"{module}.weight", parts, settings)


def _matches(stored: Shape, counts: Shape) -> bool:
    return stored == counts or (math.prod(stored) == math.prod(counts) and 1 in counts and len(stored) < 2)
