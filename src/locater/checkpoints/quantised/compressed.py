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
from .floating import Declared, find_eight_bits, find_four_bits, weight_arguments
from .weight import QuantisedWeight, Shape, find_by, unpack_bits

PARTS = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
BITS = (2, 4, 8)


@dataclass(frozen=True)
class WholeNumbers(Declared):
    """Signed codes; packed ones are stored with 2^(bits − 1) added, zero points along the outputs."""

    @property
    def is_packed(self) -> bool:
        return "weight_packed" in self.parts

    @property
    def shape(self) -> Shape:
        if not self.is_packed:
            return super().shape
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

    def numbers(self, rows: Rows | None) -> Tensor:
        if not self.is_packed:
            return super().numbers(rows)
        return self._unpacked(self.part("weight_packed", rows), self.shape[1])

    def zero(self) -> Tensor | None:
        kinds = {bool(arguments.get("symmetric", True)) for arguments in weight_arguments(self.settings)}
        self.check("weight_zero_point" in self.parts or True in kinds, "`weight_zero_point`, as declared")
        if "weight_zero_point" not in self.parts:
            return None
        zeros, counts = self.part("weight_zero_point"), self.counts
        if self.is_packed and zeros.dtype == torch.int32:
            self.check_shape("weight_zero_point", (math.ceil(counts[0] * self.bits / 32), counts[1]))
            zeros = self._unpacked(zeros.T, counts[0]).T
        self.check(zeros.numel() == math.prod(counts), f"{math.prod(counts)} zero points", zeros.numel())
        zeros = zeros.float().reshape(counts)  # some writers store zeros where there are none
        self.check(False in kinds or not bool(zeros.any()), "no zero points, as declared", "some")
        return zeros

    def groups(self) -> Tensor | None:
        if "weight_g_idx" not in self.parts:
            return None
        self.check(self.block[0] == 1, "groups along the rows with `weight_g_idx`", f"blocks of {self.block[0]} rows")
        if bool((self.codes("weight_g_idx") == -1).all()):  # as it is stored where nothing was reordered
            return None
        return self.group_of_input("weight_g_idx", self.counts[1])

    def _unpacked(self, words: Tensor, width: int) -> Tensor:
        return unpack_bits(words, self.bits)[:, :width].float() - 2 ** (self.bits - 1)


def find_compressed(store: Checkpoint, settings: JsonMapping) -> Iterator[QuantisedWeight]:
    yield from find_eight_bits(store, settings)
    yield from find_four_bits(store, settings)
    for ending, dtype in (("weight_packed", torch.int32), ("weight", torch.int8)):
        yield from find_by(WholeNumbers, ending, *PARTS, dtypes=(dtype,))(store, settings)
