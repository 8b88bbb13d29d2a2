"""Batches as a pure function of the sample's number: resumable at any step, the same for any number of processes."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from locater.errors import refusal

Batch = tuple[Shaped[Tensor, "samples ..."], Shaped[Tensor, "samples ..."]]
# Validation draws from here on; training would need as many samples to get there.
FAR = 2**62


@runtime_checkable
class Batches(Protocol):
    """Samples by number: those of training never end, those of validation are `num_validation`."""

    @property
    def num_training(self) -> int: ...  # samples of one epoch
    @property
    def num_validation(self) -> int: ...
    @property
    def tokens_per_sample(self) -> int: ...
    def training(self, first: int, count: int) -> Batch: ...
    def validation(self, first: int, count: int) -> Batch: ...


def draws(seed: int, number: int) -> numpy.random.Generator:
    """Random numbers that depend on both, and on nothing drawn before."""
    # A list with a number from 2⁶³ up would become floating point, and neighbours the same.
    key = numpy.array([seed % 2**64, number], dtype=numpy.uint64)
    return numpy.random.Generator(numpy.random.Philox(key=key))


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_windows: int, length: int) -> tuple[int, numpy.ndarray]:
    """Choose the start of this epoch's first window, and the order of all."""
    random = draws(seed, epoch)
    return int(random.integers(length)), random.permutation(num_windows)


@dataclass(frozen=True)
class WindowBatches:
    """Windows of a token stream: an epoch sees each once, in an order and from an offset of its own."""

    train: numpy.ndarray
    valid: numpy.ndarray
    length: int
    seed: int

    def __post_init__(self):
        for name, tokens in (("training", self.train), ("validation", self.valid)):
            if len(tokens) < 2 * self.length:
                remedy = "give more text or a smaller context"
                raise refusal(f"at least {2 * self.length} tokens of {name} text", len(tokens), remedy)

    @property
    def num_training(self) -> int:
        return len(self.train) // self.length - 1  # whatever the offset

    @property
    def num_validation(self) -> int:
        return (len(self.valid) - 1) // self.length

    @property
    def tokens_per_sample(self) -> int:
        return self.length

    def training(self, first: int, count: int) -> tuple[Int[Tensor, "count length"], Int[Tensor, "count length"]]:
        starts = []
        for number in range(first, first + count):
            epoch, place = divmod(number, self.num_training)
            offset, order = _order(self.seed, epoch, self.num_training, self.length)
            starts.append(offset + int(order[place]) * self.length)
        return self._cut(self.train, starts)

    def validation(self, first: int, count: int) -> tuple[Int[Tensor, "count length"], Int[Tensor, "count length"]]:
        return self._cut(self.valid, [number * self.length for number in range(first, first + count)])

    def _cut(self, tokens: numpy.ndarray, starts: list[int]) -> tuple[Tensor, Tensor]:
        windows = numpy.stack([tokens[start : start + self.length + 1] for start in starts]).astype(numpy.int64)
        found = torch.from_numpy(windows)
        return found[:, :-1], found[:, 1:]
