"""One quantised weight: the stored tensors that make it up, and the numbers they stand for.

A method is a subclass of `Weight`, for most of `Grouped`, and a function that finds such weights by the names of their
tensors.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from ...errors import Refusal, bad_value, missing
from ...records import JsonMapping
from ..base import Checkpoint, Rows

REMEDY = "convert the checkpoint to 16 bits with the tool that quantised it"
Shape = tuple[int, ...]
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class QuantisedWeight(ABC):
    """A weight (out, in) and its stored parts by role; `settings` is what the config says of the method."""

    store: Checkpoint
    name: str
    parts: Mapping[str, str]
    settings: JsonMapping

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Shape of the weight as the model uses it; may cost a small tensor that holds it."""

    @abstractmethod
    def read(self, rows: Rows | None) -> Tensor:
        """The weight in float32, or its rows."""

    def part(self, role: str, rows: Rows | None = None) -> Tensor:
        return self.store.read(self._stored(role), rows)

    def codes(self, role: str, *kinds: torch.dtype, rows: Rows | None = None) -> Tensor:
        """A part whose bits are read: of another type they would mean something else."""
        stored = self.part_dtype(role)
        self.check(stored in (kinds or WHOLE), f"`{role}` as {' or '.join(map(str, kinds)) or 'whole numbers'}", stored)
        return self.part(role, rows)

    def part_shape(self, role: str) -> Shape:
        return self.store.shape(self._stored(role))

    def matrix_shape(self, role: str) -> Shape:
        """Shape of a part that must be a matrix."""
        shape = self.part_shape(role)
        self.check(len(shape) == 2, f"a matrix as `{role}`", f"shape {[*shape]}")
        return shape

    def part_size(self, role: str, axis: int = 0) -> int:
        """Length of a part along an axis that it must have."""
        shape = self.part_shape(role)
        self.check(len(shape) > axis, f"`{role}` of more than {axis} dimensions", f"shape {[*shape]}")
        return shape[axis]

    def part_dtype(self, role: str) -> torch.dtype:
        return self.store.entry(self._stored(role)).dtype

    def check(self, condition: bool, expected: str, got: object = None) -> None:
        """Refuse the weight unless the condition holds; without `got`, what is expected is missing."""
        what = f"{expected} for the quantised `{self.name[:120]}`"
        if not condition:
            raise missing(what, REMEDY) if got is None else bad_value(what, got, REMEDY)

    def check_shape(self, role: str, *shapes: Shape) -> None:
        stored = self.part_shape(role)
        self.check(
            stored in shapes, f"`{role}` of shape {' or '.join(str(list(shape)) for shape in shapes)}", [*stored]
        )

    def _stored(self, role: str) -> str:
        if role not in self.parts:
            raise missing(f"a tensor `{role}` next to the quantised `{self.name[:120]}`", REMEDY)
        return self.parts[role]


@dataclass(frozen=True)
class Grouped(QuantisedWeight):
    """W = s·(q − z) + b: a scale for each block of numbers, and perhaps a zero point or a bias."""

    @property
    @abstractmethod
    def block(self) -> Shape:
        """Height and width of the block that has one scale."""

    @abstractmethod
    def numbers(self, rows: Rows | None) -> Tensor:
        """q in float32, for the rows asked for."""

    @abstractmethod
    def scale(self) -> Tensor:
        """s by block."""

    def zero(self) -> Tensor | None:
        """z by block, if there is any."""

    def bias(self) -> Tensor | None:
        """b by block, if there is any."""

    def groups(self) -> Tensor | None:
        """The group of each input, where a calibration has reordered them."""

    def read(self, rows: Rows | None) -> Tensor:
        shape, block = self.shape, self.block
        start, stop = rows or (0, shape[0])
        down, across = torch.arange(start, stop) // block[0], self.groups()
        across = torch.arange(shape[1]) // block[1] if across is None else across
        result = self.numbers(rows)
        if (zero := self.zero()) is not None:
            result = result - zero[down][:, across]
        result = result * self.scale()[down][:, across]
        bias = self.bias()
        return (result if bias is None else result + bias[down][:, across]).contiguous()

    @property
    def counts(self) -> Shape:
        """Number of blocks each way."""
        return count_blocks(self.shape, self.block)

    def by_block(self, role: str) -> Tensor:
        """A part with one number for each block."""
        self.check_shape(role, *spellings(self.counts))
        return self.part(role).reshape(self.counts)

    def group_of_input(self, role: str, num_groups: int) -> Tensor:
        """A part that says the group of each input."""
        self.check_shape(role, (self.shape[1],))
        groups = self.codes(role).long()
        inside = bool(((groups >= 0) & (groups < num_groups)).all())
        self.check(inside, f"groups below {num_groups} in `{role}`", "one outside")
        return groups


# From the stored names to the weights of a method.
Find = Callable[[Checkpoint, JsonMapping], Iterator[QuantisedWeight]]


def find_by(kind: type[QuantisedWeight], *roles: str, dtypes: tuple[torch.dtype, ...] = ()) -> Find:
    """Find weights whose modules have a tensor with the first of these names, of one of the types if any are given."""

    def find(store: Checkpoint, settings: JsonMapping) -> Iterator[QuantisedWeight]:
        for module in modules_with(store, roles[0], dtypes):
            yield kind(store, f"{module}.weight", parts_of(store, module, roles), settings)

    return find


def modules_with(store: Checkpoint, ending: str, dtypes: tuple[torch.dtype, ...] = ()) -> Iterator[str]:
    """The modules that have a tensor with this name, of one of the types if any are given."""
    for name in store.names:
        if name.endswith(f".{ending}") and (not dtypes or store.entries[name].dtype in dtypes):
            yield name.removesuffix(f".{ending}")


def parts_of(store: Checkpoint, module: str, endings: tuple[str, ...]) -> dict[str, str]:
    """Select a module's tensors that belong to its quantised weight, by role."""
    names = ((ending, f"{module}.{ending}") for ending in endings)
    return {ending: name for ending, name in names if name in store.entries}


def stated_count(settings: JsonMapping, key: str, default: int | None = None) -> int:
    """A whole number that the config must hold."""
    value = settings.get(key, default)
    if type(value) is not int or not 0 < value < 2**31:
        raise bad_value(f"a count as `{key}` in quantization_config", f"{value!r:.60}", "fetch config.json again")
    return value


def word(settings: JsonMapping, key: str, default: str = "") -> str:
    """A word of the config in small letters, or the default where it has none; another kind of value is no word."""
    value = settings.get(key)
    if value is None:
        return default
    if not isinstance(value, str) or not value:
        raise bad_value(f"a word as `{key}` in quantization_config", f"{value!r:.60}", "fetch config.json again")
    return value.lower()


def unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Codes of `bits` bits in the order of their bits, the lowest first, along the last dimension; codes may straddle.

    (…, n) words of any whole type become (…, n·size·8 // bits) codes.
    """
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((octets[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
    # Codes of 3, 5 or 6 bits cross bytes: shifts within each byte would cut them in two.
    spread = numpy.unpackbits(octets.numpy(), axis=-1, bitorder="little")
    whole = spread[..., : spread.shape[-1] // bits * bits].reshape(*spread.shape[:-1], -1, bits)
    return torch.from_numpy(numpy.packbits(whole, axis=-1, bitorder="little")[..., 0])


def count_blocks(shape: Shape, block: Shape) -> Shape:
    """Count the blocks each way: groups along a row divide it, blocks of several rows may be cut off.

    A grid cannot tell 33 from 32 in 64 numbers: a size that is cut off must be a power of two, of which only one fits.
    """
    for size, step in zip(shape, block, strict=True):
        if size % step if block[0] == 1 else size != step and step & (step - 1):
            raise bad_value(f"blocks that fit into {' × '.join(map(str, shape))} numbers", " × ".join(map(str, block)))
    return tuple(math.ceil(size / step) for size, step in zip(shape, block, strict=True))


def spellings(counts: Shape) -> set[Shape]:
    """The shape itself, and without its ones: a scale per row may be stored as (rows) or (rows, 1)."""
    return {counts, (counts[0],), ()} if counts == (1, 1) else {counts, (counts[0],)} if counts[1] == 1 else {counts}


def exponents(scale: Tensor) -> Tensor:
    """E8M0: a byte s stands for 2^(s − 127), and 255 for NaN; anything else is a number already."""
    if scale.dtype != torch.uint8:
        return scale.float()
    return torch.where(scale == 255, torch.nan, torch.exp2(scale.float() - 127))


def unknown(method: str) -> Refusal:
    return bad_value("weights quantised by a method that is read here", f"`{method[:60]}`", REMEDY)
