"""Heads whose weights are rows of a matrix, stored or computed (LoRA): `penalty.py` on the weights of a live model.

The graph keeps three d_h×d_h matrices per head and the parameters themselves, nothing of the weights' size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...errors import refusal
from ...models.live.rate_factor import Rates
from ...projections import widen
from ...spectra import Grams, Moments, gram_products, moments_of
from ..penalty import Gain, fold, penalty, pull_back
from ..scales import Scale
from .pairs import TINY, Pair, PerHead
from .sharding import HeadShard, shard_of


@dataclass(frozen=True)
class DensePair(Pair):
    """Heads that are rows of one weight, or of two."""

    @property
    def is_stored(self) -> bool:
        return self.query.weight.is_stored and self.key.weight.is_stored

    def leaves(self) -> dict[str, nn.Parameter]:
        if self.is_stored:
            sides = zip(self.sides, self.weights(), strict=False)  # one weight if fused
            return {rows.weight.name: weight for rows, weight in sides if weight.requires_grad}  # type: ignore[misc]
        parts = {rows.weight.name: rows.weight.parameters() for rows in self.sides}
        return {f"{weight}: {name}": leaf for weight, leaves in parts.items() for name, leaf in leaves.items()}

    def value(self, scale: Scale, gain: Gain) -> Float[Tensor, ""]:
        weights = self.weights()
        if any(hasattr(one, "ds_id") for one in weights):
            got = "those that DeepSpeed ZeRO-3 has partitioned"
            raise refusal("whole weights for a penalty in the loss", got, "give the optimizer: decoupled")
        if torch.compiler.is_compiling():
            return _traced(self, scale, gain, weights)
        return _Value.apply(self, scale, gain, *weights)

    def slopes(self, scale: Scale, gain: Gain) -> list[Tensor]:
        if not self.is_stored:
            return super().slopes(scale, gain)
        weights = self.weights()
        shard = shard_of(self, weights)
        gradients = zip(weights, shard.scatter(*by_heads(shard, scale, gain)[1]), strict=True)
        return [by for weight, by in gradients if weight.requires_grad]

    def descend(self, scale: Scale, gain: Gain, rates: Rates) -> Bool[Tensor, ""]:
        """W −= lr·∇/s in place, lr and s as the optimiser has them. Seven d_h×d_h×d products per head.

        s = √(v + mean ∇²) for each head's query and key, v the mean of Adam's second moment over them: what the
        optimiser would divide by if ∇ stood in the loss, so that one strength means the same in both forms, and no
        entry moves by much more than lr. s = 1 where the optimiser keeps no second moment (SGD).
        """
        if not self.is_stored:
            return super().descend(scale, gain, rates)
        weights = self.weights()
        shard = shard_of(self, weights, exact=True)
        grams, gradients = by_heads(shard, scale, gain)
        units = _units(shard, gradients, rates)
        sides = zip((shard.query, shard.key), gradients, units, self.sides, (weights[0], weights[-1]), strict=True)
        for heads, by_weight, unit, rows, weight in sides:
            if weight.requires_grad:
                rate = rates.learning_rate(weight, rows.weight.name)
                heads.addcdiv_(by_weight, unit, value=-rate) if unit is not None else heads.sub_(by_weight, alpha=rate)
        shard.commit()
        return grams.is_finite

    def squares(self, gradients: Sequence[Tensor]) -> Float[Tensor, " groups"]:
        if not self.is_stored:
            return super().squares(gradients)
        weights, parts = self.weights(), iter(gradients)
        shard = shard_of(self, [next(parts) if one.requires_grad else torch.zeros_like(one) for one in weights])
        sides = [side.square().sum((1, 2, 3)) for side in (shard.query, shard.key)]
        return shard.everywhere(shard.complete_sums(sides[0] + sides[1])[:, None])[:, 0]

    def traces(self, gain: Gain) -> PerHead:
        shard = shard_of(self, self.weights())
        return shard.everywhere(shard.traces(shard.own(gain)))

    def moments(self, gain: Gain) -> Moments:
        shard = shard_of(self, self.weights())
        moments = moments_of(grams_of(shard, gain), d_model=self.d_model)
        sums = (moments.trace, moments.trace_of_square, moments.frobenius_squared)
        return Moments(*map(shard.everywhere, sums), d_model=moments.d_model, d_head=moments.d_head)

    def clip(self, factors: PerHead) -> None:
        """Half to the query and half to the key; shared or frozen keys leave it all to the query."""
        moved = [rows for rows in self.sides if rows.weight.is_trained and rows.num_heads == self.query.num_heads]
        if not moved:
            raise refusal("trained queries to clip, where keys are shared", f"frozen ones in {self.name}")
        for rows in moved:
            rows.scale((factors.sqrt() if len(moved) == 2 else factors)[..., None])


class _Value(torch.autograd.Function):
    """Backward: ∇_Q and ∇_K from the slopes, four d_h×d_h×d products per head."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, scale: Scale, gain: Gain, *weights: Tensor) -> Tensor:
        with torch.autocast(weights[0].device.type, enabled=False):
            shard = shard_of(pair, weights)
            grams, scale = grams_of(shard, gain), scale.on(shard.groups)
            ctx.pair, ctx.gain = pair, gain
            ctx.save_for_backward(*weights, *scale.slope(grams, d_model=pair.d_model, rotary=pair.rotary))
            return shard.total(scale.value(grams, d_model=pair.d_model, rotary=pair.rotary))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_value: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        *weights, core, query, key = ctx.saved_tensors
        with torch.autocast(core.device.type, enabled=False):
            shard = shard_of(ctx.pair, weights)
            slope = Grams(*(by_value[0].to(core) * matrix for matrix in (core, query, key)))
            gradients = pull_back(slope, shard.query, shard.key, gain=shard.own(ctx.gain))
            return None, None, None, *shard.scatter(*gradients)


def _traced(pair: Pair, scale: Scale, gain: Gain, weights: tuple[Tensor, ...]) -> Float[Tensor, ""]:
    """The same by autograd, for a compiler that derives and fuses by itself; plain tensors only."""
    with torch.autocast(weights[0].device.type, enabled=False):
        query, key = pair.query.view(widen(weights[0])), pair.key.view(widen(weights[-1]))
        return penalty(query, key, scale=scale, rotary=pair.rotary, gain=gain).sum()


def grams_of(shard: HeadShard, gain: Gain = None) -> Grams:
    """Compute the Gram products of the local heads, over all columns."""
    return shard.complete(gram_products(*fold(shard.query, shard.key, shard.own(gain))))


def by_heads(shard: HeadShard, scale: Scale, gain: Gain) -> tuple[Grams, tuple[Tensor, Tensor]]:
    """Compute the Gram products of the local heads, and the gradient by their queries and keys."""
    # A stabiliser that is attached, or steps, inside of autocast computes with the weights as they are stored.
    with torch.autocast(shard.query.device.type, enabled=False):
        grams, pair = grams_of(shard, gain), shard.pair
        slope = scale.on(shard.groups).slope(grams, d_model=pair.d_model, rotary=pair.rotary)
        return grams, pull_back(slope, shard.query, shard.key, gain=shard.own(gain))


def _units(shard: HeadShard, gradients: tuple[Tensor, Tensor], rates: Rates) -> list[Tensor | None]:
    """s for every head's query and key; None for 1."""
    moments = [rates.second_moment(weight) for weight in shard.weights]
    if any(one is None for one in moments):
        return [None, None]
    means = shard_of(shard.pair, [one[0] for one in moments if one is not None])
    corrections = [one[1] for one in moments if one is not None]
    squares = []
    for heads, gradient, correction in zip(
        (means.query, means.key), gradients, (corrections[0], corrections[-1]), strict=True
    ):
        total = heads.sum((-2, -1)) * correction + torch.linalg.vector_norm(gradient, dim=(-2, -1)).square()
        squares.append(shard.complete_sums(total) / (heads.shape[-2] * shard.pair.d_model))
    return [square.sqrt().clamp_min(TINY)[..., None, None] for square in squares]
