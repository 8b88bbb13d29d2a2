"""Change of each head's weights since the last report: alarms begin there, long before logits show it.

Through d_h×d_h products, without any d×d matrix. Per layer: a few products of O(d·d_h²) per head, and its weights once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.bounds import bounds_of, with_gain
from ..head import Head
from ..spectra import gram_products, moments_of, spectral_entropy, stable_rank, update_singular_values
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
        return cls(with_gain(query, heads[0].query), with_gain(key, heads[0].key), tuple(heads))

    @torch.no_grad()
    def numbers(self, before: "Weights | None") -> dict[str, Float[Tensor, " heads"]]:
        """η, σ₁(W), the bound on logits, symmetry tr W²/‖W‖²; and of ΔW its size, stable rank and spectral entropy."""
        products = gram_products(self.query, self.key)
        sigma = singular_values_of_grams(products.query, products.key)
        numbers = {
            "eta": moments_of(products, d_model=self.query.shape[-1]).eta,
            "sigma_1": sigma[:, 0],
            "logit_bound": bounds_of(self.heads, products, sigma[:, 0], self.query.shape[-1]),
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
