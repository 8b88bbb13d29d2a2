"""Change of each head's weights since the last report: alarms begin there, long before logits show it.

Through d_h×d_h products, without any d×d matrix. Per layer: a few products of O(d·d_h²) per head, and its weights once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..head import Head
from ..projections import Projection
from ..spectra import Grams, gram_products, moments_of, spectral_entropy, stable_rank, update_singular_values
from ..spectra.singular import singular_values_of_grams


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a layer's heads at one moment, the input norm's gain folded in."""

    query: Float[Tensor, "heads d_head d_model"]
    key: Float[Tensor, "heads d_head d_model"]
    heads: tuple[Head, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, heads: Sequence[Head]) -> "Weights | None":
        """None for projections that are products themselves, whose weight is not one matrix."""
        if not heads or any(side.low_rank is not None for head in heads for side in (head.query, head.key)):
            return None
        query, key = (torch.stack([getattr(head, side).weight.detach() for head in heads]) for side in ("query", "key"))
        return cls(_with_gain(query, heads[0].query), _with_gain(key, heads[0].key), tuple(heads))

    @torch.no_grad()
    def numbers(self, before: "Weights | None") -> dict[str, Float[Tensor, " heads"]]:
        """η, σ₁(W), the bound on logits, symmetry tr W²/‖W‖²; and of ΔW its size, stable rank and spectral entropy."""
        products = gram_products(self.query, self.key)
        sigma = singular_values_of_grams(products.query, products.key)
        numbers = {
            "eta": moments_of(products, d_model=self.query.shape[-1]).eta,
            "sigma_1": sigma[:, 0],
            "logit_bound": _bounds(self.heads, products, sigma[:, 0], self.query.shape[-1]),
            "symmetry": products.trace_of_square / products.frobenius_squared,
        }
        if before is not None:
            update = update_singular_values(self.query, self.key, before.query, before.key)
            size = torch.linalg.vector_norm(update, dim=-1) / torch.linalg.vector_norm(sigma, dim=-1)
            numbers |= {
                "update_ratio": size,
                "update_stable_rank": stable_rank(update).where(size > 0, torch.nan),
                "update_entropy": spectral_entropy(update).where(size > 0, torch.nan),
            }
        return numbers


def _with_gain(weight: Tensor, projection: Projection) -> Tensor:
    """A copy, so that the next report can tell what has changed; the heads of a layer share the norm before them.

    Centred behind a layer norm, whose output has mean 0: see `Norm.fold`.
    """
    norm = projection.input_norm
    weight = weight.float() * (1.0 if norm is None or norm.gain is None else norm.gain.detach().float())
    return weight - weight.mean(-1, keepdim=True) if norm is not None and norm.kind == "layer" else weight


def _bounds(heads: Sequence[Head], products: Grams, sigma: Tensor, d_model: int) -> Float[Tensor, " heads"]:
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
