"""What no logit of a head can exceed, from its weights alone: a norm bounds its inputs, or its queries and keys."""

import math

import torch
from torch import Tensor

from ..head import Head
from ..positions import Alibi
from ..projections import Norm, Projection, widen
from ..spectra import Grams, side_norms


def logit_bounds(groups: list[list[Head]], grams: Grams, sigma: Tensor, *, temperature: float) -> list[float | None]:
    """max |ω| of each head over all inputs and distances; None where nothing bounds it.

    With inputs of length r = √d behind their norm (gain folded): σ₁(W) r²/λ, and under rotary positions
    (σ₁(W_Q) r + ‖b_Q‖)(σ₁(W_K) r + ‖b_K‖)/λ. With QK-norm: the lengths that its gains allow. A soft-cap bounds too.
    """
    first = groups[0][0]
    if first.query.norm is not None and first.key.norm is not None:
        products = [_length(head.query) * _length(head.key) for group in groups for head in group]
    elif not _is_bounded(first.query) or not _is_bounded(first.key):
        products = [math.inf for group in groups for _ in group]
    else:
        products = _by_input(groups, grams, sigma)
    heads = [head for group in groups for head in group]
    return [_finished(head, product / temperature) for head, product in zip(heads, products, strict=True)]


def _is_bounded(projection: Projection) -> bool:
    return projection.input_norm is not None and projection.is_linear


def _by_input(groups: list[list[Head]], grams: Grams, sigma: Tensor) -> list[float]:
    query_norms, key_norms = (norm.expand_as(sigma).flatten().tolist() for norm in side_norms(grams))  # upper bounds
    heads = [head for group in groups for head in group]
    sides = {id(side): side for head in heads for side in (head.query, head.key)}  # a group's key once
    bias_lengths = {number: _bias_length(side) for number, side in sides.items()}
    bounds = []
    for head, of_both, of_query, of_key in zip(heads, sigma.flatten().tolist(), query_norms, key_norms, strict=True):
        ours, theirs = (_radius(side.input_norm, head.d_model) for side in (head.query, head.key))
        query_bias, key_bias = bias_lengths[id(head.query)], bias_lengths[id(head.key)]
        if head.rotary is not None:
            bounds.append((of_query * ours + query_bias) * (of_key * theirs + key_bias))
        else:
            crossed = of_key * theirs * query_bias + of_query * ours * key_bias
            bounds.append(of_both * ours * theirs + crossed + query_bias * key_bias)
    return bounds


def _radius(norm: Norm | None, d_model: int) -> float:
    return 1.0 if norm is not None and norm.kind == "l2" else math.sqrt(d_model)


def _bias_length(projection: Projection) -> float:
    """‖W b_norm + b‖: what is added to every query or key of the normalised input."""
    bias, norm = projection.bias, projection.input_norm
    total = None if bias is None else widen(bias.detach())
    if norm is not None and norm.bias is not None:
        weight = widen(projection.weight.detach())
        shift = weight @ norm.bias.detach().to(weight)
        total = shift if total is None else total + shift
    return 0.0 if total is None else float(torch.linalg.vector_norm(total))


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
