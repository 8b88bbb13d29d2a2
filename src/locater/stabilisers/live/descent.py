"""One pair's penalty in the autograd graph, and its decoupled step: `penalty.py` on the weights of a live model.

The graph keeps three d_h×d_h matrices per head and the parameters themselves, nothing of the weights' size.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...projections import whole, widen
from ...spectra import Grams, Moments, gram_products, moments_of
from ..base import Rates
from ..penalty import Gain, fold, penalty, pull_back
from ..scales import Scale
from .latent import LatentPair
from .pairs import Pair
from .sharding import HeadShard, shard_of

TINY = 1e-12  # where neither the loss nor the penalty has a gradient there is nothing to divide


def value(pair: Pair, scale: Scale, gain: Gain) -> Float[Tensor, ""]:
    """The sum over the pair's heads, as a scalar of the autograd graph."""
    if isinstance(pair, LatentPair):
        with torch.autocast(pair.weights()[0].device.type, enabled=False):
            return scale.value(pair.grams(gain), d_model=pair.d_model, rotary=pair.rotary).sum()
    weights = pair.weights()
    if torch.compiler.is_compiling():
        return _traced(pair, scale, gain, weights)
    return _Value.apply(pair, scale, gain, *weights)


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
    """The Gram products of the heads at hand, over all columns."""
    return shard.complete(gram_products(*fold(shard.query, shard.key, shard.own(gain))))


def moments_at(shard: HeadShard, gain: Gain = None) -> Moments:
    """tr W, tr W² and ‖W‖² of the heads at hand."""
    return moments_of(grams_of(shard, gain), d_model=shard.pair.d_model)


def by_heads(shard: HeadShard, scale: Scale, gain: Gain) -> tuple[Grams, tuple[Tensor, Tensor]]:
    """The Gram products of the heads at hand, and the gradient by their queries and keys."""
    grams, pair = grams_of(shard, gain), shard.pair
    slope = scale.on(shard.groups).slope(grams, d_model=pair.d_model, rotary=pair.rotary)
    return grams, pull_back(slope, shard.query, shard.key, gain=shard.own(gain))


def descend(pair: Pair, scale: Scale, gain: Gain, rates: Rates) -> Bool[Tensor, ""]:
    """W −= lr·∇/s in place, lr and s as the optimiser has them. Seven d_h×d_h×d products per head.

    s = √(v + mean ∇²) for each head's query and key, v the mean of Adam's second moment over them: what the optimiser
    would divide by if ∇ stood in the loss, so that one strength means the same in both forms, and no entry moves by
    much more than lr. s = 1 where the optimiser keeps no second moment (SGD). Weights that are computed from parameters
    (LoRA, parametrisations) hand the gradient on to these. Says whether all was finite, as a tensor, so that a GPU need
    not be waited for at each layer.
    """
    if isinstance(pair, LatentPair):
        return _descend_latent(pair, scale, gain, rates)
    with torch.enable_grad():
        weights = pair.weights()
    shard = shard_of(pair, weights)
    grams, gradients = by_heads(shard, scale, gain)
    if not pair.is_stored:
        _hand_on(pair, weights, shard.scatter(*gradients), rates)
        return grams.is_finite
    units = _units(shard, gradients, rates)
    sides = zip((shard.query, shard.key), gradients, units, pair.sides, (weights[0], weights[-1]), strict=True)
    for heads, by_weight, unit, rows, weight in sides:
        if weight.requires_grad:
            rate = rates.learning_rate(weight, rows.weight.name)
            heads.addcdiv_(by_weight, unit, value=-rate) if unit is not None else heads.sub_(by_weight, alpha=rate)
    shard.commit()
    return grams.is_finite


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


def latent_slopes(pair: LatentPair, scale: Scale, gain: Gain) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """The gradient by every trained parameter that the heads are made of, under its name."""
    leaves = pair.leaves()
    with torch.enable_grad():
        total = value(pair, scale, gain)
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {name: (leaf, by) for (name, leaf), by in zip(leaves.items(), found, strict=True)}


def _descend_latent(pair: LatentPair, scale: Scale, gain: Gain, rates: Rates) -> Bool[Tensor, ""]:
    slopes = latent_slopes(pair, scale, gain)
    for name, (parameter, by) in slopes.items():
        _move(parameter, by, rates, name)
    return torch.stack([torch.isfinite(whole(by)).all() for _, by in slopes.values()]).all()


def _hand_on(pair: Pair, weights: tuple[Tensor, ...], gradients: tuple[Tensor, ...], rates: Rates) -> None:
    """Through the graph that made the weights, which is as small as they are."""
    named = {id(one): (name, one) for rows in pair.sides for name, one in rows.weight.parameters().items()}
    leaves = [parameter for _, parameter in named.values()]
    moved = [(weight, by) for weight, by in zip(weights, gradients, strict=True) if weight.requires_grad]
    by_leaf = torch.autograd.grad([weight for weight, _ in moved], leaves, [by for _, by in moved], allow_unused=True)
    for (name, parameter), by in zip(named.values(), by_leaf, strict=True):
        if by is not None:
            _move(parameter, by, rates, name)


def _move(parameter: nn.Parameter, by: Tensor, rates: Rates, name: str) -> None:
    """In the optimiser's unit, taken over the whole parameter."""
    known = rates.second_moment(parameter)
    unit = 1.0 if known is None else (known[0].mean() * known[1] + by.square().mean()).sqrt().clamp_min(TINY)
    parameter.sub_(by / unit, alpha=rates.learning_rate(parameter, name))
