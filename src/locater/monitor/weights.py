"""What the weights of each head have done since the last report: where alarms begin, long before logits show it.

Through d_h×d_h products, without any d×d matrix. Per layer: a few products of O(d·d_h²) per head, and its weights once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..head import Head
from ..spectra import grams, moments_of, singular_values, spectral_entropy, stable_rank, update_singular_values


@dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a layer's heads at one moment, the input norm's gain folded in."""

    query: Float[Tensor, "heads d_head d_model"]
    key: Float[Tensor, "heads d_head d_model"]
    bound: Float[Tensor, " heads"]

    @classmethod
    @torch.no_grad()
    def of(cls, heads: Sequence[Head]) -> "Weights | None":
        """None for projections that are products themselves, whose weight is not one matrix."""
        if not heads or any(side.low_rank is not None for head in heads for side in (head.query, head.key)):
            return None
        folded = [head.folded() for head in heads]
        query, key = (torch.stack([getattr(head, side).weight for head in folded]) for side in ("query", "key"))
        query, key = query.detach().float().clone(), key.detach().float().clone()
        return cls(query, key, _bounds(heads, folded, query, key))

    @torch.no_grad()
    def numbers(self, before: "Weights | None") -> dict[str, Float[Tensor, " heads"]]:
        """η, σ₁(W), the bound on logits, symmetry tr W²/‖W‖²; and of ΔW its size, stable rank and spectral entropy."""
        products = grams(self.query, self.key)
        sigma = singular_values(self.query, self.key)
        numbers = {
            "eta": moments_of(products, d_model=self.query.shape[-1]).eta,
            "sigma_1": sigma[:, 0],
            "logit_bound": self.bound,
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


def _bounds(heads: Sequence[Head], folded: Sequence[Head], query: Tensor, key: Tensor) -> Float[Tensor, " heads"]:
    """No logit can exceed σ₁(W)·d/λ, for a norm gives inputs of length √d at most (Cauchy and Schwarz).

    Where rotary positions or biases stand between, (σ₁(W_Q)√d + |b_Q|)·(σ₁(W_K)√d + |b_K|)/λ instead. NaN where no
    norm is known before, or one stands behind; a soft-cap bounds by itself.
    """
    head, d_model = heads[0], query.shape[-1]
    if head.softcap is not None:
        return torch.full((len(heads),), head.softcap, dtype=torch.float64)
    if head.query.input_norm is None or head.key.input_norm is None or head.query.norm is not None:
        return torch.full((len(heads),), torch.nan, dtype=torch.float64)
    biases = [(one.query.bias, one.key.bias) for one in folded]
    if head.rotary is None and all(bias is None for pair in biases for bias in pair):
        return singular_values(query, key)[:, 0] * d_model / head.temperature
    lengths = torch.tensor([[0.0 if one is None else float(one.norm()) for one in pair] for pair in biases]).mT
    sides = [torch.linalg.matrix_norm(part.double(), 2) * d_model**0.5 for part in (query, key)]
    return (sides[0].cpu() + lengths[0]) * (sides[1].cpu() + lengths[1]) / head.temperature
