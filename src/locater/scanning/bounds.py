"""What no logit of a head can exceed, from its weights alone: a norm bounds its inputs, or its queries and keys."""

import math

import torch
from torch import Tensor

from ..head import Head
from ..positions import Alibi
from ..projections import Norm, Projection, widen
from ..spectra import Grams, side_norms

Biases = list[tuple[Tensor | None, Tensor | None]]


def logit_bounds(
    groups: list[list[Head]], grams: Grams, sigma: Tensor, biases: Biases, *, temperature: float
) -> list[float | None]:
    """max |ω| of each head over all inputs and distances; None where nothing bounds it.

    `biases` are those of `folded_biases`. With inputs of length r = √d behind their norm (gain folded):
    (σ₁(W) r² + ‖W_K^T b_Q‖ r + ‖W_Q^T b_K‖ r + |b_Q·b_K|)/λ, and under rotary positions
    (σ₁(W_Q) r + ‖b_Q‖)(σ₁(W_K) r + ‖b_K‖)/λ. With QK-norm: the lengths that its gains allow. A soft-cap bounds too.
    """
    first = groups[0][0]
    if first.query.norm is not None and first.key.norm is not None:
        products = [_length(head.query) * _length(head.key) for group in groups for head in group]
    elif not _is_bounded(first.query) or not _is_bounded(first.key):
        products = [math.inf for group in groups for _ in group]
    else:
        products = _by_input(groups, grams, sigma, biases)
    heads = [head for group in groups for head in group]
    return [_finished(head, product / temperature) for head, product in zip(heads, products, strict=True)]


def _is_bounded(projection: Projection) -> bool:
    return projection.input_norm is not None and projection.is_linear


def folded_biases(groups: list[list[Head]]) -> Biases:
    """What is added to every query and key of the normalised input, by head."""
    heads = [head for group in groups for head in group]
    sides = {id(side): side for head in heads for side in (head.query, head.key)}  # a group's key once
    biases = {number: _bias(side) for number, side in sides.items()}
    return [(biases[id(head.query)], biases[id(head.key)]) for head in heads]


def _by_input(groups: list[list[Head]], grams: Grams, sigma: Tensor, own: Biases) -> list[float]:
    heads = [head for group in groups for head in group]
    radii = _radius(heads[0].query.input_norm, heads[0].d_model), _radius(heads[0].key.input_norm, heads[0].d_model)
    if heads[0].rotary is None:
        through = sigma.flatten().double() * radii[0] * radii[1]
        return (through + _of_biases(own, grams, radii)).tolist() if _any(own) else through.tolist()
    lengths = [[0.0 if bias is None else float(bias.norm()) for bias in pair] for pair in own]
    norms = [norm.expand_as(sigma).flatten().tolist() for norm in side_norms(grams)]  # upper bounds
    return [
        (of_query * radii[0] + query_bias) * (of_key * radii[1] + key_bias)
        for of_query, of_key, (query_bias, key_bias) in zip(*norms, lengths, strict=True)
    ]


def _any(biases: Biases) -> bool:
    return any(bias is not None for pair in biases for bias in pair)


def _of_biases(biases: Biases, grams: Grams, radii: tuple[float, float]) -> Tensor:
    """‖W_K^T b_Q‖ r + ‖W_Q^T b_K‖ r + |b_Q·b_K| of every head, the lengths by the Gram matrices: b^T W W^T b."""
    none = grams.query.new_zeros(grams.query.shape[-1])
    query, key = (
        torch.stack([none if bias is None else bias for bias in side]).to(none).unflatten(0, grams.query.shape[:-2])
        for side in zip(*biases, strict=True)
    )
    of_keys, of_queries = _stretched(query, grams.key), _stretched(key, grams.query)
    return (of_keys * radii[1] + of_queries * radii[0] + (query * key).sum(-1).abs()).flatten().double()


def _stretched(bias: Tensor, gram: Tensor) -> Tensor:
    """√(b^T G b); rounding may leave it below 0 where it is nothing."""
    return ((bias[..., None, :] @ gram)[..., 0, :] * bias).sum(-1).clamp_min(0).sqrt()


def _radius(norm: Norm | None, d_model: int) -> float:
    return 1.0 if norm is not None and norm.kind == "l2" else math.sqrt(d_model)


def _bias(projection: Projection) -> Tensor | None:
    """W b_norm + b: what is added to every query or key of the normalised input."""
    bias, norm = projection.bias, projection.input_norm
    total = None if bias is None else widen(bias.detach())
    if norm is not None and norm.bias is not None:
        weight = widen(projection.weight.detach())
        shift = weight @ norm.bias.detach().to(weight)
        total = shift if total is None else total + shift
    return total


def _length(projection: Projection) -> float:
    """How long a query or key behind its own norm can be: max |gain| · √rows, and its bias."""
    norm = projection.norm
    assert norm is not None
    rows = len(projection.whole.weight) if projection.whole is not None else len(projection.weight)
    gain = 1.0 if norm.gain is None else float(norm.gain.detach().abs().max())
    bias = 0.0 if norm.bias is None else float(norm.bias.detach().norm())
    return gain * (1.0 if norm.kind == "l2" else math.sqrt(rows)) + bias


def _finished(head: Head, bound: float) -> float | None:
    """With the amplitude of stretched rotary positions, the soft-cap, and what distance adds."""
    if head.query.norm is not None and head.rotary is not None:
        bound *= max(1.0, head.rotary.amplitude) ** 2
    bound = bound if head.softcap is None else min(bound, head.softcap)
    if isinstance(head.position_bias, Alibi):
        bound = bound if head.lookahead == 0 else math.inf  # ahead, what it adds grows without end
    elif head.position_bias is not None:
        bound += float(head.position_bias.table.detach().abs().max())
    return bound if math.isfinite(bound) else None
