"""Eight- and four-bit floating-point weights with scales: FP8, MXFP8, NVFP4, MXFP4, in all their spellings.

W = q·s, one s per tensor, row, group or block. The scale's shape must be that of a block which the config declares:
a scale that fits no declared block is refused, since most shapes could mean several.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import refusal
from ...records import JsonMapping
from ..base import Checkpoint, Rows
from .weight import Shape, Weight, exponents, grid, modules_with, parts_of, spread_over, unpack_bits, word

EIGHT_BITS = tuple(getattr(torch, f"float8_{kind}") for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"))
SCALES = ("weight_scale_inv", "weight_scale")  # both multiply, whatever the first is called
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the fourth bit is the sign
NVFP4_GROUP, MX_GROUP = 16, 32
ALL = 2**31
PLAIN = [(ALL, ALL), (1, ALL)]  # one scale per tensor or row: no other block has grids of these shapes


@dataclass(frozen=True)
class EightBits(Weight):
    """`weight` in eight bits and a scale that multiplies it."""

    @property
    def shape(self) -> Shape:
        return self.part_shape("weight")

    def read(self, rows: Rows | None) -> Tensor:
        role = next((role for role in SCALES if role in self.parts), SCALES[0])
        block, stored = self._block(role), self.part_dtype(role)
        self.check(not _are_exponents(self.settings) or stored in _exponents(), "exponents as scales", stored)
        scale = exponents(self.part(role))
        scale = scale.reshape(grid(self.shape, block))
        return self.part("weight", rows).float() * spread_over(scale, self.shape, block, rows)

    def _block(self, role: str) -> Shape:
        """The block whose grid has the scale's shape: a declared one, or else one per tensor or row."""
        shape, scale = self.shape, self.part_shape(role)
        declared = declared_blocks(self.settings)
        blocks = [tuple(min(pair) for pair in zip(block, shape, strict=True)) for block in declared or PLAIN]
        fitting = {block for block in blocks if scale in _spellings(grid(shape, block))}
        sizes = " or ".join(f"{height}×{width}" for height, width in declared) or "1×all or all×all"
        wanted = f"a scale for each block of {sizes} in {' × '.join(map(str, shape))} numbers"
        self.check(len(fitting) == 1, wanted, f"`{role}` of shape {[*scale]}")
        return fitting.pop()


@dataclass(frozen=True)
class FourBits(Weight):
    """Two E2M1 numbers per byte, the lower half first, in groups along a row; NVFP4 scales the tensor, too."""

    @property
    def packed(self) -> str:
        return "weight_packed" if "weight_packed" in self.parts else "weight"

    @property
    def shape(self) -> Shape:
        shape = self.part_shape(self.packed)
        self.check(len(shape) == 2, "a matrix", f"shape {[*shape]}")
        return shape[0], 2 * shape[1]

    def read(self, rows: Rows | None) -> Tensor:
        shape, is_mx = self.shape, self.part_dtype("weight_scale") in _exponents()
        block = (1, MX_GROUP if is_mx else NVFP4_GROUP)
        self.check_shape("weight_scale", grid(shape, block))
        declared = {width for _, width in declared_blocks(self.settings)} or {block[1]}
        self.check(block[1] in declared, f"groups of {block[1]}", f"{sorted(declared)} in the config")
        scale = exponents(self.part("weight_scale")) * self._whole(is_mx)
        table = torch.tensor([sign * value for sign in (1, -1) for value in FOUR_BITS])
        codes = unpack_bits(self.part(self.packed, rows), 4)
        return table[codes.long()] * spread_over(scale, shape, block, rows)

    def _whole(self, is_mx: bool) -> Tensor:
        """The scale of the whole tensor: compressed-tensors divides by its own, ModelOpt multiplies."""
        roles = [role for role in ("weight_global_scale", "weight_scale_2") if role in self.parts]
        self.check(len(roles) == (0 if is_mx else 1), "no second scale" if is_mx else "one scale of the tensor", roles)
        if is_mx:
            return torch.ones(())
        self.check_shape(roles[0], (), (1,))
        scale = self.part(roles[0]).float().reshape(())
        return 1 / scale if roles[0] == "weight_global_scale" else scale


def find_eight_bits(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    for module in modules_with(store, "weight"):
        entry = store.entries[f"{module}.weight"]
        if entry.dtype in EIGHT_BITS and len(entry.shape) == 2:
            parts = parts_of(store, module, ("weight", *SCALES))
            if len(parts) == 3:
                raise refusal(f"one scale for `{module[:120]}.weight`", f"two, {SCALES[0]} and {SCALES[1]}")
            yield EightBits(store, f"{module}.weight", parts, settings)


def find_four_bits(store: Checkpoint, settings: JsonMapping) -> Iterator[Weight]:
    for ending in ("weight_packed", "weight"):
        for module in modules_with(store, ending):
            parts = parts_of(store, module, (ending, "weight_scale", "weight_global_scale", "weight_scale_2"))
            if store.entries[f"{module}.{ending}"].dtype == torch.uint8 and "weight_scale" in parts:
                yield FourBits(store, f"{module}.weight", parts, settings)


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
        raise refusal("two positive whole numbers as the block of a scale in config.json", f"{value!r:.60}")
    return tuple(value)


def _spellings(shape: Shape) -> set[Shape]:
    """The shape itself, and without its ones: a scale per row may be stored as (rows) or (rows, 1)."""
    return {shape, (shape[0],), ()} if shape == (1, 1) else {shape, (shape[0],)} if shape[1] == 1 else {shape}


def _exponents() -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, name) for name in ("uint8", "float8_e8m0fnu") if hasattr(torch, name))
