"""Positions in a logit: rotations of the query and key, at frequencies that variants stretch to longer
contexts, or a bias added to their product.

Every variant answers `frequencies(base, num_dims, length)` and carries the `amplitude` that multiplies cosine and sine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .errors import refusal

Frequencies = Float[Tensor, " pairs"]


def plain_frequencies(base: float, num_dims: int) -> Frequencies:
    """base^(−2j/num_dims) for j = 0 … num_dims/2 − 1 (Su et al. 2021, arXiv 2104.09864)."""
    return base ** -(torch.arange(0, num_dims, 2, dtype=torch.float64) / num_dims)


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor`: positions interpolated (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        return plain_frequencies(base, num_dims) / self.factor


def longer(base: float, stretch: float, num_dims: int) -> float:
    """base · stretch^(d/(d − 2)): the slowest pair turns `stretch` times slower, the fastest as before."""
    if num_dims < 4:
        raise refusal("at least 4 rotated dimensions, for a base that is stretched", num_dims)
    exponent = num_dims / (num_dims - 2)
    if not 0 < stretch < 1e200 ** (1 / exponent):
        raise refusal("a positive stretch of the rotary base, within what numbers can hold", stretch)
    return base * stretch**exponent


@dataclass(frozen=True)
class NTK:
    """A base that is stretched once and for all, whatever the length."""

    stretch: float
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        return plain_frequencies(longer(base, self.stretch, num_dims), num_dims)


@dataclass(frozen=True)
class DynamicNTK:
    """The base grows with the length once the text is longer than `original_length`."""

    factor: float
    original_length: int
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        stretch = self.factor * max(length, self.original_length) / self.original_length - (self.factor - 1)
        return plain_frequencies(longer(base, stretch, num_dims), num_dims)


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
        return plain_frequencies(base, num_dims) * (1 - interpolated + interpolated / self.factor)


@dataclass(frozen=True)
class Llama3:
    """Wavelengths beyond the original context divided by `factor`, short ones kept, a smooth step between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        frequencies = plain_frequencies(base, num_dims)
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
        return plain_frequencies(base, num_dims) / torch.tensor(factors, dtype=torch.float64)


@dataclass(frozen=True)
class Proportional:
    """Only the first `num_turning` pairs turn, at the speeds of the whole head; the others stand still."""

    num_turning: int
    factor: float = 1.0
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        frequencies = plain_frequencies(base, num_dims) / self.factor
        frequencies[self.num_turning :] = 0
        return frequencies


@dataclass(frozen=True)
class Given:
    """The frequencies themselves, as they were measured in a model that no formula is known for."""

    values: tuple[float, ...]
    amplitude: float = 1.0

    def frequencies(self, base: float, num_dims: int, length: int) -> Frequencies:
        return torch.tensor(self.values, dtype=torch.float64)


Scaling = LinearScaling | NTK | DynamicNTK | YaRN | Llama3 | LongRoPE | Proportional | Given


@dataclass(frozen=True)
class Rotary:
    """Rows `start … start + num_dims` of a head turn in pairs by position × frequency.

    Half-split pairs are (j, j + num_dims/2), interleaved ones (2j, 2j + 1); `backward` turns them the other way.
    """

    base: float
    num_dims: int
    start: int = 0
    interleaved: bool = False
    scaling: Scaling | None = None
    backward: bool = False

    def __post_init__(self):
        if self.num_dims < 2 or self.num_dims % 2:
            raise refusal("an even number of rotated dimensions, at least 2", self.num_dims)
        if not self.base > 0:
            raise refusal("a positive rotary base", self.base)

    @property
    def amplitude(self) -> float:
        """Factor of cosine and sine, on the query and on the key alike."""
        return self.scaling.amplitude if self.scaling else 1.0

    @property
    def pairs(self) -> Int[Tensor, "pairs 2"]:
        rows = torch.arange(self.start, self.start + self.num_dims)
        pairs = rows.reshape(-1, 2) if self.interleaved else rows.reshape(2, -1).T
        return pairs.flip(-1) if self.backward else pairs

    def frequencies(self, length: int) -> Float[Tensor, " pairs"]:
        """Radians per position of each pair; only NTK and LongRoPE look at the length of the text."""
        if self.scaling is None:
            return plain_frequencies(self.base, self.num_dims)
        return self.scaling.frequencies(self.base, self.num_dims, length)

    def rotate(
        self, vectors: Float[Tensor, "*batch tokens d_head"], positions: Int[Tensor, "*#batch tokens"], *, length: int
    ) -> Float[Tensor, "*batch tokens d_head"]:
        """Turn each token's rows to its position."""
        angles = positions[..., None].to(torch.float64) * self.frequencies(length).to(positions.device)
        cosine = (angles.cos() * self.amplitude).to(vectors.dtype)
        sine = (angles.sin() * self.amplitude).to(vectors.dtype)
        first, second = self.pairs.to(vectors.device).unbind(-1)
        left, right = vectors[..., first], vectors[..., second]
        turned = vectors.clone()
        turned[..., first] = left * cosine - right * sine
        turned[..., second] = right * cosine + left * sine
        return turned


Distance = Int[Tensor, "*batch queries keys"]  # query position minus key position
Added = Float[Tensor, "*batch queries keys"]


@dataclass(frozen=True)
class Alibi:
    """−slope × distance (Press et al. 2022, arXiv 2108.12409)."""

    slope: float
    kind: ClassVar[tuple[str | int, ...]] = ("slope",)

    def __call__(self, distance: Distance) -> Added:
        return -self.slope * distance.to(torch.float64)


@dataclass(frozen=True, eq=False)
class Buckets:
    """A learned number per bucket of distance: exact when near, logarithmic when far (Raffel et al. 2020, T5)."""

    table: Float[Tensor, " buckets"]
    bidirectional: bool
    max_distance: int = 128

    def __call__(self, distance: Distance) -> Added:
        return self.table[self.bucket(distance)]

    @property
    def kind(self) -> tuple[str | int, ...]:
        """Parameters that the bucket of a distance depends on."""
        return "buckets", len(self.table), self.bidirectional, self.max_distance

    def bucket(self, distance: Distance) -> Distance:
        num_buckets, offset = len(self.table), torch.zeros_like(distance)
        if self.bidirectional:
            num_buckets //= 2
            offset = (distance < 0).long() * num_buckets
            distance = distance.abs()
        else:
            distance = distance.clamp(min=0)
        num_exact = num_buckets // 2
        # float32, as the models themselves compute it: a bucket border must not move by rounding.
        far = (distance.float() / num_exact).clamp(min=1).log() / math.log(self.max_distance / num_exact)
        coarse = (num_exact + (far * (num_buckets - num_exact)).long()).clamp(max=num_buckets - 1)
        return offset + torch.where(distance < num_exact, distance, coarse)


PositionBias = Alibi | Buckets


def added_by_distance(biases: Sequence[PositionBias], distance: Distance) -> Float[Tensor, "heads *batch queries keys"]:
    """Evaluate several biases, slopes or tables of one kind, at each distance: buckets are found once for all.

    >>> added_by_distance([Alibi(0.5), Alibi(2.0)], torch.tensor([[0, 1]])).tolist()
    [[[-0.0, -0.5]], [[-0.0, -2.0]]]
    """
    tables = [bias.table for bias in biases if isinstance(bias, Buckets)]
    if isinstance(biases[0], Buckets):
        return torch.stack(tables)[:, biases[0].bucket(distance)]
    slopes = torch.tensor([bias.slope for bias in biases if isinstance(bias, Alibi)], dtype=torch.float64)
    return -slopes[(...,) + (None,) * distance.dim()] * distance.to(torch.float64)
