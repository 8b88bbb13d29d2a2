"""Upper bound of a head's logits, from its weights alone: a norm bounds its inputs, or its queries and keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..positions import Alibi, Buckets
from ..projections import Norm, Projection, widen
from ..spectra import Grams, side_norms
from .batch import HeadBatch
from .products import Products


@dataclass(frozen=True, eq=False)
class Biases:
    """Biases on every query and key of the normalised input, W b_norm + b.

    None where nothing is, and where a norm behind the projection would change it.
    """

    query: Float[Tensor, "groups heads d_head"] | None
    key: Float[Tensor, "groups 1 d_head"] | None

    @classmethod
    def of(cls, batch: HeadBatch, products: Products) -> "Biases":
        if not batch.is_linear:
            return NO_BIASES
        query = _total(batch.queries, products.query_shift, batch.num_groups)
        return cls(query, _total(batch.keys, products.key_shift, batch.num_groups))


NO_BIASES = Biases(None, None)


def _total(side: Sequence[Projection], shift: Tensor | None, num_groups: int) -> Tensor | None:
    own = [projection.bias for projection in side if projection.bias is not None]
    if not own:
        return shift
    total = widen(torch.stack(own)).unflatten(0, (num_groups, -1))
    return total if shift is None else total + shift


def logit_bounds(
    batch: HeadBatch, grams: Grams, sigma: Tensor, biases: Biases, *, temperature: float
) -> list[float | None]:
    """max |ω| of each head over all inputs and distances; None where nothing bounds it.

    With inputs of length r = √d behind their norm (gain folded):
    (σ₁(W) r² + ‖W_K^T b_Q‖ r + ‖W_Q^T b_K‖ r + |b_Q·b_K|)/λ, and under rotary positions
    (σ₁(W_Q) r + ‖b_Q‖)(σ₁(W_K) r + ‖b_K‖)/λ. With QK-norm: the lengths that its gains allow. A soft-cap bounds too.
    """
    first = batch.first
    if first.query.norm is not None and first.key.norm is not None:
        keys = _lengths(batch.keys).repeat_interleave(batch.per_group)
        products = _lengths(batch.queries) * keys
    elif not _is_bounded(first.query) or not _is_bounded(first.key):
        products = torch.full((len(batch),), math.inf, dtype=torch.float64)
    else:
        products = _by_input(batch, grams, sigma, biases)
    bounds = _with_positions(batch, products / temperature).tolist()
    return [bound if math.isfinite(bound) else None for bound in bounds]


def _is_bounded(projection: Projection) -> bool:
    return projection.input_norm is not None and projection.is_linear


def _by_input(batch: HeadBatch, grams: Grams, sigma: Tensor, biases: Biases) -> Float[Tensor, " heads"]:
    first, d_model = batch.first, batch.first.d_model
    query_radius, key_radius = _radius(first.query.input_norm, d_model), _radius(first.key.input_norm, d_model)
    if first.rotary is None:
        through = sigma.double() * query_radius * key_radius
        return (through + _of_biases(biases, grams, (query_radius, key_radius))).flatten()
    of_query, of_key = (norm.double() for norm in side_norms(grams))  # upper bounds
    query_length = 0.0 if biases.query is None else biases.query.norm(dim=-1).double()
    key_length = 0.0 if biases.key is None else biases.key.norm(dim=-1).double()
    product = (of_query * query_radius + query_length) * (of_key * key_radius + key_length)
    return product.expand_as(sigma).flatten()


def _of_biases(biases: Biases, grams: Grams, radii: tuple[float, float]) -> Tensor | float:
    """‖W_K^T b_Q‖ r + ‖W_Q^T b_K‖ r + |b_Q·b_K| of every head, the lengths by the Gram matrices: b^T W W^T b."""
    query, key, total = biases.query, biases.key, 0.0
    if query is not None:
        total = total + _stretched(query, grams.key) * radii[1]
    if key is not None:
        total = total + _stretched(key, grams.query) * radii[0]
    if query is not None and key is not None:
        total = total + (query * key).sum(-1).abs()
    return total


def _stretched(bias: Tensor, gram: Tensor) -> Tensor:
    """√(b^T G b); rounding may leave it below 0 where it is nothing."""
    return ((bias[..., None, :].to(gram) @ gram)[..., 0, :] * bias).sum(-1).clamp_min(0).sqrt()


def _radius(norm: Norm | None, d_model: int) -> float:
    return 1.0 if norm is not None and norm.kind == "l2" else math.sqrt(d_model)


def _lengths(side: Sequence[Projection]) -> Float[Tensor, " heads"]:
    """Bound the length of queries or keys after their own norm: max |gain| · √rows, and the norm's bias."""
    first, norms = side[0], [projection.norm for projection in side if projection.norm is not None]
    rows = len(first.weight if first.whole is None else first.whole.weight)
    length = 1.0 if norms[0].kind == "l2" else math.sqrt(rows)
    gains = [norm.gain for norm in norms if norm.gain is not None]
    biases = [norm.bias for norm in norms if norm.bias is not None]
    gain = torch.stack(gains).abs().amax(-1).double() if gains else torch.ones(len(side), dtype=torch.float64)
    return gain * length + torch.stack(biases).norm(dim=-1).double() if biases else gain * length


def _with_positions(batch: HeadBatch, bounds: Float[Tensor, " heads"]) -> Float[Tensor, " heads"]:
    """With the amplitude of stretched rotary positions, the soft-cap, and what distance adds."""
    first, tables = batch.first, [head.position_bias for head in batch.heads]
    if first.query.norm is not None and first.rotary is not None:
        bounds = bounds * max(1.0, first.rotary.amplitude) ** 2
    bounds = bounds if first.softcap is None else bounds.clamp(max=first.softcap)
    if isinstance(first.position_bias, Alibi):
        return bounds if first.lookahead == 0 else bounds + math.inf  # ahead, what it adds grows without end
    added = [bias.table for bias in tables if isinstance(bias, Buckets)]
    return bounds + torch.stack(added).abs().amax(-1).double() if added else bounds
