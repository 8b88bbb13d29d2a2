"""Variants that stretch rotary frequencies to longer contexts, each a frozen set of numbers and one formula.

Every variant answers `frequencies(base, num_dims, length)` and carries the `amplitude` that multiplies cosine and sine.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Frequencies = Float[Tensor, " pairs"]


def plain(base: float, num_dims: int) -> Frequencies:
    """base^(−2j/num_dims) for j = 0 … num_dims/2 − 1 (Su et al. 2021, arXiv 2104.09864)."""
    return base ** -(torch.arange(0, num_dims, 2, dtype=torch.float64) / num_dims)


@dataclass(frozen=True)
class Linear:
    """All frequencies divided by `factor`: positions interpolated (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        return plain(base, num_dims) / self.factor


@dataclass(frozen=True)
class DynamicNTK:
    """The base grows with the length once the text is longer than `original_length`."""

    factor: float
    original_length: int
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        stretch = self.factor * max(length, self.original_length) / self.original_length - (self.factor - 1)
        return plain(base * stretch ** (num_dims / (num_dims - 2)), num_dims)


@dataclass(frozen=True)
class YaRN:
    """Slow pairs interpolated, fast pairs kept, a ramp between (Peng et al. 2023, arXiv 2309.00071)."""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    truncate: bool = True

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        def pair_that_turns(rotations: float) -> float:
            return num_dims * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, num_dims - 1)
        width = high - low or 0.001
        interpolated = ((torch.arange(num_dims // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
        return plain(base, num_dims) * (1 - interpolated + interpolated / self.factor)


@dataclass(frozen=True)
class Llama3:
    """Wavelengths beyond the original context divided by `factor`, short ones kept, a smooth step between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        frequencies = plain(base, num_dims)
        turns = self.original_length * frequencies / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class LongRoPE:
    """A divisor per pair, one set for short texts and one for long (Ding et al. 2024, arXiv 2402.13753)."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        factors = self.long_factors if length > self.original_length else self.short_factors
        return plain(base, num_dims) / torch.tensor(factors, dtype=torch.float64)


@dataclass(frozen=True)
class Proportional:
    """Only the first `num_turning` pairs turn, at the speeds of the whole head; the others stand still."""

    num_turning: int
    factor: float = 1.0
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        frequencies = plain(base, num_dims) / self.factor
        frequencies[self.num_turning :] = 0
        return frequencies


Scaling = Linear | DynamicNTK | YaRN | Llama3 | LongRoPE | Proportional
