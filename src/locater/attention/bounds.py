"""Bounds on logits that need no input: from the weights of a layer's heads, behind the norm before them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..head import Head
from ..projections import Projection
from ..spectra import Grams, gram_products
from ..spectra.singular import singular_values_of_grams


@torch.no_grad()
def logit_bounds(heads: Sequence[Head]) -> Float[Tensor, " heads"]:
    """No logit of a head can exceed its bound; NaN where nothing is known to bound it, or weights are products."""
    if any(side.low_rank is not None for head in heads for side in (head.query, head.key)):
        return torch.full((len(heads),), torch.nan)
    query, key = (torch.stack([getattr(head, side).weight.detach() for head in heads]) for side in ("query", "key"))
    query, key = with_gain(query, heads[0].query), with_gain(key, heads[0].key)
    products = gram_products(query, key)
    sigma = singular_values_of_grams(products.query, products.key)[:, 0]
    return bounds_of(heads, products, sigma, query.shape[-1])


def with_gain(weight: Tensor, projection: Projection) -> Tensor:
    """A copy, so that the next report can tell what has changed; the heads of a layer share the norm before them.

    Centred behind a layer norm, whose output has mean 0: see `Norm.fold`.
    """
    norm = projection.input_norm
    weight = weight.float() * (1.0 if norm is None or norm.gain is None else norm.gain.detach().float())
    return weight - weight.mean(-1, keepdim=True) if norm is not None and norm.kind == "layer" else weight


def bounds_of(heads: Sequence[Head], products: Grams, sigma: Tensor, d_model: int) -> Float[Tensor, " heads"]:
    """No logit can exceed σ₁(W)·d/λ, for a norm gives inputs of length √d at most (Cauchy and Schwarz).

    Where rotary positions or biases stand between, (σ₁(W_Q)√d + |b_Q|)·(σ₁(W_K)√d + |b_K|)/λ instead. NaN where no
    norm is known before, or one stands behind; a soft-cap bounds by itself.
    """
    head = heads[0]
    if head.softcap is not None:
        return torch.full_like(sigma, head.softcap)
    if head.query.input_norm is None or head.key.input_norm is None or head.query.norm is not None:
        return torch.full_like(sigma, torch.nan)
    biases = torch.tensor([[_length(side) for side in (one.query, one.key)] for one in heads]).to(sigma)
    if head.rotary is None and not bool(biases.any()):
        return sigma * d_model / head.temperature
    sides = torch.stack([_largest(gram) for gram in (products.query, products.key)], -1)
    return (sides * d_model**0.5 + biases).prod(-1) / head.temperature


def _largest(gram: Tensor) -> Tensor:
    """σ₁ of a factor, or a bound on it where its Gram matrix is not finite."""
    finite = gram.isfinite().all(-1).all(-1)[..., None, None]
    return torch.linalg.eigvalsh(gram.double().where(finite, 0.0))[..., -1].sqrt().where(finite[..., 0, 0], torch.nan)


def _length(side: Projection) -> float:
    """|b| with the norm's bias taken through the weights."""
    bias = side.folded().bias if side.input_norm is not None and side.input_norm.bias is not None else side.bias
    return 0.0 if bias is None else float(bias.detach().norm())
