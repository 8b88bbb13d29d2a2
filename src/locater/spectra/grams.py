"""The Gram products of a head, d_h×d_h each: what is known of W = W_K^T W_Q follows from the three of them.

They are for inputs of covariance 1; weights can carry any other (`whiten`).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal

Covariance = float | Tensor


class Grams(NamedTuple):
    """The core M = W_K W_Q^T, and the Gram matrices of query and key."""

    core: Float[Tensor, "*#batch d_head d_head"]
    query: Float[Tensor, "*#batch d_head d_head"]
    key: Float[Tensor, "*#batch d_head d_head"]

    @property
    def trace(self) -> Float[Tensor, "*batch"]:
        """tr W = tr M."""
        return self.core.diagonal(dim1=-2, dim2=-1).sum(-1)

    @property
    def trace_of_square(self) -> Float[Tensor, "*batch"]:
        """tr W² = Σ M∘M^T; may be negative."""
        return (self.core * self.core.mT).sum((-2, -1))

    @property
    def frobenius_squared(self) -> Float[Tensor, "*batch"]:
        """‖W‖_F² = Σ W_Q W_Q^T ∘ W_K W_K^T."""
        return (self.query * self.key).sum((-2, -1))

    @property
    def is_finite(self) -> Tensor:
        """Tell whether all entries are finite, as a tensor, so that a GPU need not be waited for.

        The diagonals hold squared row norms: where they are finite so are all rows, and every product by Cauchy and
        Schwarz.
        """
        query, key = (gram.diagonal(dim1=-2, dim2=-1).sum() for gram in (self.query, self.key))
        return torch.isfinite(query + key)


def working(
    query: Float[Tensor, "..."], key: Float[Tensor, "..."]
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Both weights in the precision of the computation: float64 if one of them is, else float32."""
    if query.shape[-2:] != key.shape[-2:]:
        raise refusal("query and key of one shape (d_h, d)", f"{tuple(query.shape)} and {tuple(key.shape)}")
    if query.shape[-2] > query.shape[-1]:
        raise refusal("a head dimension within the model's", tuple(query.shape), "give weights as (d_h, d)")
    dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
    return query.to(dtype), key.to(dtype)


def gram_products(
    query: Float[Tensor, "*#batch query_rows columns"], key: Float[Tensor, "*#batch key_rows columns"]
) -> Grams:
    """M, W_Q W_Q^T and W_K W_K^T: three products of O(d·d_h²), nothing of size d×d, and no check of what comes out.

    Keys that several heads share come as (…, 1, d_h, d) beside queries (…, heads, d_h, d).
    """
    return Grams(_core(query, key), query @ query.mT, key @ key.mT)


def _core(query: Tensor, key: Tensor) -> Tensor:
    is_grouped = query.dim() > 2 and key.shape[:-2] == (*query.shape[:-3], 1)
    if not is_grouped:
        return key @ query.mT
    # All heads of a group in one product: broadcasting would copy the key for each of them.
    core = key.squeeze(-3) @ query.flatten(-3, -2).mT
    return core.unflatten(-1, (query.shape[-3], -1)).transpose(-3, -2)


def grams(query: Float[Tensor, "*#batch d_head d_model"], key: Float[Tensor, "*#batch d_head d_model"]) -> Grams:
    """`gram_products` in float64 for float64 input, in float32 for anything lower.

    Refuses weights whose products are not finite there.
    """
    products = gram_products(*working(query, key))
    if not bool(products.is_finite):
        raise refusal("weights with finite products", "NaN or infinity", "check the weights, or give them as float64")
    return products


def whiten(
    query: Float[Tensor, "*#batch d_head d_model"],
    key: Float[Tensor, "*#batch d_head d_model"],
    covariance: Covariance,
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """W_Q L and W_K L with L L^T = Σ, so that their form is that of Σ^{1/2} W Σ^{1/2} up to a rotation of the inputs.

    Σ is a number, the diagonal (d,) or the full matrix (d, d); it may be singular. The full one costs an
    eigendecomposition. Refuses what is not a covariance.
    """
    query, key = working(query, key)
    if isinstance(covariance, (int, float)) and covariance == 1:
        return query, key
    root = covariance_root(torch.as_tensor(covariance, dtype=query.dtype, device=query.device), query.shape[-1])
    if root.dim() == 2:
        return query @ root, key @ root
    return query * root, key * root


def covariance_root(covariance: Float[Tensor, "..."], d_model: int) -> Float[Tensor, "..."]:
    """L with L L^T = Σ, of the same shape as Σ: a number, a diagonal, or a matrix."""
    shape = tuple(covariance.shape)
    if shape not in ((), (d_model,), (d_model, d_model)):
        raise refusal(f"a covariance that is a number, ({d_model},) or ({d_model}, {d_model})", f"shape {shape}")
    if not torch.isfinite(covariance).all():
        raise refusal("a finite covariance", "NaN or infinity")
    if covariance.dim() < 2:
        if (covariance < 0).any():
            raise refusal("variances of at least 0", float(covariance.min()))
        return covariance.sqrt()
    # Rounding in an estimated covariance grows with its size, so both tests are relative to it.
    tolerance = covariance.abs().max() * d_model * torch.finfo(covariance.dtype).eps * 16
    if (covariance - covariance.mT).abs().max() > tolerance:
        raise refusal("a symmetric covariance", "one that is not", "average it with its transpose")
    values, vectors = torch.linalg.eigh(covariance)
    if values[0] < -tolerance:
        raise refusal("a covariance without negative eigenvalues", float(values[0]))
    return vectors * values.clamp_min(0).sqrt()
