"""Weights with a scale per tensor, row, group or block, as the config declares: W = s·q or s·(q − z).

FP8, MXFP8, NVFP4 and MXFP4 in all their spellings, and the whole numbers of compressed-tensors. The scale's shape must
be that of a block which the config declares: one that fits none is refused, since most shapes could mean several.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...errors import bad_value
from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .weight import (
    Grouped,
    QuantisedWeight,
    Shape,
    count_blocks,
    exponents,
    find_by,
    modules_with,
    parts_of,
    spellings,
    unknown,
    unpack_bits,
    word,
)

EIGHT_BITS = tuple(getattr(torch, f"float8_{kind}") for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))
EXPONENTS = tuple(getattr(torch, name) for name in ("uint8", "float8_e8m0fnu") if hasattr(torch, name))
SCALES = ("weight_scale_inv", "weight_scale")  # both multiply, whatever the first is called
FOUR_BITS = torch.tensor(
    [sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
)  # E2M1
NVFP4_GROUP, MX_GROUP = 16, 32
ALL = 2**31
PLAIN = [(ALL, ALL), (1, ALL)]  # one scale per tensor or row: no other block has grids of these shapes


@dataclass(frozen=True)
class Declared(Grouped):
    """A number per byte, and a scale that has the shape of a block which the config declares, or of tensor or rows."""

    NUMBERS: ClassVar = "weight"
    SCALE: ClassVar = "weight_scale"

    @property
    def scale_name(self) -> str:
        return self.SCALE

    @property
    def shape(self) -> Shape:
        return self.matrix_shape(self.NUMBERS)

    @property
    def block(self) -> Shape:
        """The block whose grid has the scale's shape: a declared one, or else one per tensor or row."""
        shape, stored = self.shape, self.part_shape(self.scale_name)
        declared = declared_blocks(self.settings)
        blocks = {tuple(map(min, zip(block, shape, strict=True))) for block in declared or PLAIN}
        # By the shape alone several blocks could fit: the wrong one gives numbers of the right size, all wrong.
        fitting = [block for block in blocks if stored in spellings(count_blocks(shape, block))]
        sizes = " or ".join(f"{height}×{width}" for height, width in declared) or "1×all or all×all"
        wanted = f"a scale for each block of {sizes} in {' × '.join(map(str, shape))} numbers"
        self.check(len(fitting) == 1, wanted, f"`{self.scale_name}` of shape {[*stored]}")
        return fitting[0]

    def numbers(self, rows: Rows | None) -> Tensor:
        return self.codes(self.NUMBERS, torch.int8, *EIGHT_BITS, rows=rows).float()

    def scale(self) -> Tensor:
        return self.by_block(self.scale_name).float()


@dataclass(frozen=True)
class FP8(Declared):
    """`weight` in eight bits and a scale that multiplies it."""

    @property
    def scale_name(self) -> str:
        return next((role for role in SCALES if role in self.parts), SCALES[0])

    def numbers(self, rows: Rows | None) -> Tensor:
        stored = self.part_dtype(self.scale_name)
        self.check(not _are_exponents(self.settings) or stored in EXPONENTS, "exponents as scales", stored)
        return super().numbers(rows)

    def scale(self) -> Tensor:
        return exponents(self.by_block(self.scale_name))


@dataclass(frozen=True)
class FP4(Grouped):
    """Two E2M1 numbers per byte, the lower half first, in groups along a row; NVFP4 scales the tensor, too."""

    @property
    def packed(self) -> str:
        return "weight_packed" if "weight_packed" in self.parts else "weight"

    @property
    def shape(self) -> Shape:
        shape = self.matrix_shape(self.packed)
        return shape[0], 2 * shape[1]

    @property
    def is_mx(self) -> bool:
        return self.part_dtype("weight_scale") in EXPONENTS

    @property
    def block(self) -> Shape:
        width = MX_GROUP if self.is_mx else NVFP4_GROUP
        declared = {width for _, width in declared_blocks(self.settings)} or {width}
        self.check(width in declared, f"groups of {width}", f"{sorted(declared)} in the config")
        return 1, width

    def numbers(self, rows: Rows | None) -> Tensor:
        return FOUR_BITS[unpack_bits(self.part(self.packed, rows), 4).long()]

    def scale(self) -> Tensor:
        """By group and, in NVFP4, of the whole tensor: compressed-tensors divides by its own, ModelOpt multiplies."""
        scale, is_mx = exponents(self.by_block("weight_scale")), self.is_mx
        roles = [role for role in ("weight_global_scale", "weight_scale_2") if role in self.parts]
        self.check(len(roles) == (0 if is_mx else 1), "no second scale" if is_mx else "one scale of the tensor", roles)
        if is_mx:
            return scale
        self.check_shape(roles[0], (), (1,))
        whole = self.part(roles[0]).float().reshape(())
        return scale * (1 / whole if roles[0] == "weight_global_scale" else whole)


def find_eight_bits(store: Checkpoint, settings: JsonMapping) -> Iterator[QuantisedWeight]:
    for module in modules_with(store, "weight", EIGHT_BITS):
        if len(store.shape(f"{module}.weight")) == 2:
            parts = parts_of(store, module, ("weight", *SCALES))
            if len(parts) == 3:
                raise bad_value(f"one scale for `{module[:120]}.weight`", f"two, {SCALES[0]} and {SCALES[1]}")
            yield FP8(store, f"{module}.weight", parts, settings)


def find_four_bits(store: Checkpoint, settings: JsonMapping) -> Iterator[QuantisedWeight]:
    for ending in ("weight_packed", "weight"):
        for module in modules_with(store, ending, (torch.uint8,)):
            parts = parts_of(store, module, (ending, "weight_scale", "weight_global_scale", "weight_scale_2"))
            if "weight_scale" in parts:
                yield FP4(store, f"{module}.weight", parts, settings)


def find_modelopt(store: Checkpoint, settings: JsonMapping) -> Iterator[QuantisedWeight]:
    algorithm = word(settings, "quant_algo")
    if algorithm not in ("fp8", "nvfp4", "mxfp8"):
        raise unknown(f"modelopt {algorithm or 'without quant_algo'}")
    return (find_four_bits if algorithm == "nvfp4" else find_eight_bits)(store, settings)


def declared_blocks(settings: JsonMapping) -> list[Shape]:
    """The blocks, height × width, that a config speaks of; a huge size stands for "all"."""
    block = settings.get("weight_block_size")
    if block is not None:
        return [_pair(block)]
    if "mxfp8" in (word(settings, "quant_method"), word(settings, "quant_algo")):
        return [(1, MX_GROUP)]
    return [found for arguments in weight_arguments(settings) if (found := _block_of(arguments)) is not None]


def weight_arguments(settings: JsonMapping) -> list[JsonMapping]:
    """`config_groups.*.weights` of compressed-tensors."""
    groups = settings.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    inner = [group.get("weights") for group in groups if isinstance(group, Mapping)]
    return [arguments for arguments in inner if isinstance(arguments, Mapping)]


def _are_exponents(settings: JsonMapping) -> bool:
    """Tell whether the config declares scales that are powers of two."""
    if "mxfp8" in (word(settings, "quant_method"), word(settings, "quant_algo")):
        return True
    return any("uint8" in str(arguments.get("scale_dtype")) for arguments in weight_arguments(settings))


def _block_of(arguments: JsonMapping) -> Shape | None:
    strategy, group = word(arguments, "strategy"), arguments.get("group_size")
    if not strategy:  # as compressed-tensors infers it
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    if strategy == "block":
        return _pair(arguments.get("block_structure"))
    if strategy in ("group", "tensor_group"):
        return _pair((1, group))
    return {"tensor": (ALL, ALL), "channel": (1, ALL)}.get(strategy)


def _pair(value: object) -> Shape:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise bad_value("two positive whole numbers as the block of a scale in config.json", f"{value!r:.60}")
    return tuple(value)


# -------------------------------------------------------------------------------- whole numbers of compressed-tensors
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


find_whole_numbers = (
    find_by(WholeNumbers, "weight_packed", *PARTS, dtypes=(torch.int32,)),
    find_by(WholeNumbers, "weight", *PARTS, dtypes=(torch.int8,)),
)
