"""Inputs of any covariance Σ: weights that carry it, so that everything else may take Σ = I."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from .grams import working

Covariance = float | Tensor


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
