"""`Pair`: the queries and keys of one attention module, as a batch of heads that is read from the live weights."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ...errors import refusal
from ...head import Block
from ...models.live.masters import current, write_master
from ...models.live.rate_factor import Rates
from ...positions import Rotary
from ...projections import whole
from ...spectra import Moments
from ..penalty import Gain
from ..scales import Scale
from .weights import Rows

PerHead = Float[Tensor, "groups heads"]
TINY = 1e-12  # where neither the loss nor the penalty has a gradient there is nothing to divide


@dataclass(frozen=True)
class Pair(ABC):
    """Query heads (groups, heads, d_h, d) and their keys (groups, 1, d_h, d); `first` is the first head's index."""

    block: Block
    layer: int
    first: int
    query: Rows
    key: Rows
    temperature: float
    d_model: int
    rotary: Rotary | None

    @property
    def sides(self) -> tuple[Rows, Rows]:
        return self.query, self.key

    @property
    def is_fused(self) -> bool:
        return self.query.weight.identity == self.key.weight.identity

    @property
    @abstractmethod
    def is_stored(self) -> bool:
        """True if the weights of heads are rows of parameters themselves."""

    @property
    def is_grouped(self) -> bool:
        return self.query.num_heads > 1

    @property
    def shape(self) -> tuple[int, int]:
        """Groups, and query heads in each."""
        return self.query.num_groups, self.query.num_heads

    @property
    def name(self) -> str:
        return f"{self.block} layer {self.layer} ({self.query.weight.name})"

    def weights(self) -> tuple[Tensor, ...]:
        """The tensors that hold the rows, once each: one if fused, else two."""
        query = self.query.weight.read()
        return (query,) if self.is_fused else (query, self.key.weight.read())

    @abstractmethod
    def leaves(self) -> dict[str, nn.Parameter]:
        """The trained parameters that the heads are, or are computed from, by name."""

    @abstractmethod
    def value(self, scale: Scale, gain: Gain) -> Float[Tensor, ""]:
        """The sum of a scale over all heads, as a scalar of the autograd graph."""

    def slopes(self, scale: Scale, gain: Gain) -> list[Tensor]:
        """The gradient of that sum by each leaf."""
        with torch.enable_grad():
            total = self.value(scale, gain)
        leaves = list(self.leaves().values())
        return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))

    def descend(self, scale: Scale, gain: Gain, rates: Rates) -> Bool[Tensor, ""]:
        """One decoupled step on that sum; returns whether all was finite, as a tensor, without a wait for the GPU.

        In the optimiser's unit, here taken over each whole leaf.
        """
        slopes = self.slopes(scale, gain)
        for (name, leaf), by in zip(self.leaves().items(), slopes, strict=True):
            known = rates.second_moment(leaf)
            unit = 1.0 if known is None else (known[0].mean() * known[1] + by.square().mean()).sqrt().clamp_min(TINY)
            value = current(leaf)
            write_master(leaf, value.sub_(by.to(value.dtype) / unit, alpha=rates.learning_rate(leaf, name)))
        return torch.stack([torch.isfinite(whole(by)).all() for by in slopes]).all()

    def squares(self, gradients: Sequence[Tensor]) -> Float[Tensor, " groups"]:
        """Squared norms of gradients by the leaves, for each group of heads where these can be separated."""
        return torch.stack([whole(one.square().sum()) for one in gradients]).sum()[None]

    @abstractmethod
    def traces(self, gain: Gain) -> PerHead:
        """tr W of all heads, on every rank."""

    @abstractmethod
    def moments(self, gain: Gain) -> Moments:
        """tr W, tr W² and ‖W‖² of all heads, on every rank."""

    @abstractmethod
    def clip(self, factors: PerHead) -> None:
        """Scale every logit of head h by factors[h], in the weights and biases."""


def check_stored(pairs: Sequence[Pair], what: str, remedy: str) -> None:
    """For what writes into weights: of computed ones (LoRA, a parametrisation) it would write into a copy."""
    for pair in pairs:
        if not all(rows.weight.is_stored for rows in pair.sides):
            raise refusal(f"plain parameters to {what}", f"computed weights in {pair.name}", remedy)


def num_heads(pairs: Sequence[Pair], name: str) -> int:
    """The heads of a module, of which pairs may be a part each."""
    return max(pair.first + math.prod(pair.shape) for pair in pairs if pair.name == name)
