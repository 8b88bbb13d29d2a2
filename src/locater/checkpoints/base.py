"""Interface of every reader of stored weights: names, shapes and settings at once, numbers on request."""

import difflib
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy
import torch
from jaxtyping import Shaped
from torch import Tensor

from ..budget import budget, check_memory
from ..errors import refusal, within
from ..records import Json
from .bytes import ByteSource, check_range

Rows = tuple[int, int]
QUANTISATION = ("quantization_config", "compression_config", "quantization")  # entries of a config that say how
MOST_DIMENSIONS, MOST_NUMBERS = 32, 2**60


def are_counts(values: object) -> TypeGuard[Sequence[int]]:
    """Tell whether these are whole numbers, as few and as small as shapes, strides and places in a file are."""
    if not isinstance(values, list | tuple) or len(values) > MOST_DIMENSIONS:
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


@dataclass(frozen=True)
class Entry:
    """One stored tensor, as `read` will give it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Refuse what no tensor can be: a file can write any size down, beside a zero that makes it cost nothing."""
        if not are_counts(self.shape) or math.prod(max(size, 1) for size in self.shape) >= MOST_NUMBERS:
            raise refusal("the shape of a tensor", reprlib.repr(list(self.shape)), "the file is damaged")


class Checkpoint(ABC):
    """Stored weights, read one tensor at a time.

    Opening costs the headers; `read` costs the bytes of the tensor, or of the rows asked for where the format allows.
    """

    format: str
    metadata: Mapping[str, str] = {}  # what the header of a safetensors file says beside its tensors

    def __init__(
        self, entries: Mapping[str, Entry], *, config: Json, place: str, parts: Iterable["Checkpoint | ByteSource"] = ()
    ) -> None:
        """`parts` are the files and checkpoints that this one reads from, and closes."""
        with within(place):
            _check_names(entries)
        self.entries, self.config, self.place = entries, config, place
        self.parts = list({id(part): part for part in parts}.values())

    @property
    def names(self) -> KeysView[str]:
        return self.entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            nearest = difflib.get_close_matches(name, list(self.entries)[:5000], n=1)
            remedy = f"the nearest name is {nearest[0]}" if nearest else ""
            raise refusal(f"the name of a tensor in {self.place}", name, remedy)
        return self.entries[name]

    def read(self, name: str, rows: Rows | None = None) -> Shaped[Tensor, "..."]:
        """The tensor, or its rows `start <= i < stop` along the first dimension; fails on a name that is not there."""
        shape = self.shape(name)
        if rows is None:
            return self.fetch(name, None)
        if not shape or not 0 <= rows[0] <= rows[1] <= shape[0]:
            raise refusal(f"rows within {name} of shape {list(shape)}", f"{rows[0]} to {rows[1]}")
        return self.fetch(name, None if rows == (0, shape[0]) else rows)

    @abstractmethod
    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        """Read a tensor or some of its rows; name and rows were checked by `read`."""

    def close(self) -> None:
        """Close connections and files."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_names(names: Collection[str]) -> None:
    """Names are searched, split and shown many times over: neither too many nor too long."""
    limits = budget()
    limits.check("tensors", len(names))
    limits.check("name", max(map(len, names), default=0))
    limits.check("names", sum(map(len, names)))


def read_tensor(source: ByteSource, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Shaped[Tensor, "..."]:
    """The tensor whose bytes lie in the source from `start` on, row after row."""
    length = math.prod(shape) * dtype.itemsize
    check_range(source, start, length)
    check_memory(length, source.name)
    # numpy's memory is not zeroed first, and lies in large pages: half the time of a bytearray.
    data = numpy.empty(length, numpy.uint8)
    source.readinto(start, data.data)
    return torch.from_numpy(data).view(dtype).reshape(shape) if length else torch.empty(shape, dtype=dtype)


def row_span(shape: tuple[int, ...], itemsize: int, rows: Rows | None) -> tuple[int, tuple[int, ...]]:
    """First byte and shape of the rows of a tensor stored row after row."""
    if rows is None:
        return 0, shape
    return rows[0] * math.prod(shape[1:]) * itemsize, (rows[1] - rows[0], *shape[1:])
