"""Numbers added to a logit that depend only on the distance between query and key."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

Distance = Int[Tensor, "*batch queries keys"]  # query position minus key position
Added = Float[Tensor, "*batch queries keys"]


@dataclass(frozen=True)
class Alibi:
    """−slope × distance (Press et al. 2022, arXiv 2108.12409)."""

    slope: float

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
