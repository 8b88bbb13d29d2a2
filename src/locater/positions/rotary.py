"""Rotary positions: which rows of a head turn, in which pairs, at which frequencies."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import refusal
from .scaling import Scaling, plain


@dataclass(frozen=True)
class Rotary:
    """Rows `start … start + num_dims` of a head turn in pairs by position × frequency.

    Half-split pairs are (j, j + num_dims/2), interleaved ones (2j, 2j + 1).
    """

    base: float
    num_dims: int
    start: int = 0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self):
        if self.num_dims < 2 or self.num_dims % 2:
            raise refusal("an even number of rotated dimensions, at least 2", self.num_dims)
        if not self.base > 0:
            raise refusal("a positive rotary base", self.base)

    @property
    def amplitude(self) -> float:
        """What multiplies cosine and sine, on the query and on the key alike."""
        return self.scaling.amplitude if self.scaling else 1.0

    @property
    def pairs(self) -> Int[Tensor, "pairs 2"]:
        rows = torch.arange(self.start, self.start + self.num_dims)
        return rows.reshape(-1, 2) if self.interleaved else rows.reshape(2, -1).T

    def frequencies(self, length: int) -> Float[Tensor, " pairs"]:
        """Radians per position of each pair; only NTK and LongRoPE look at the length of the text."""
        if self.scaling is None:
            return plain(self.base, self.num_dims)
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
