"""Moments and eigenvalues of a head's bilinear form W = W_K^T W_Q."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from ..errors import refusal
from .grams import Grams, grams, working

# Shares of tr W² and ‖W‖² in η²: those that they have in the variance of the signal, averaged over all positions.
ETA_WEIGHTS = 1, 2


@dataclass(frozen=True, eq=False)
class Moments:
    """tr W, tr W² and ‖W‖_F² of every head of a batch, with what is derived from them.

    The eigenvalues of W are complex when W is not symmetric. Their mean is real, and so is `variance`, the mean of
    (λ − m)² without an absolute value: rotation-like parts count negative, so it may be below zero. The spread
    E|μ − m|², which may not, needs the eigenvalues themselves (`spread`).
    """

    trace: Float[Tensor, "*batch"]
    trace_of_square: Float[Tensor, "*batch"]
    frobenius_squared: Float[Tensor, "*batch"]
    d_model: int
    d_head: int

    @property
    def mean(self) -> Float[Tensor, "*batch"]:
        """tr W / d, over all d eigenvalues."""
        return self.trace / self.d_model

    @property
    def variance(self) -> Float[Tensor, "*batch"]:
        """tr W² / d − mean², over all d eigenvalues; negative when the spectrum is mostly imaginary."""
        return self.trace_of_square / self.d_model - self.mean.square()

    @property
    def mean_nonzero(self) -> Float[Tensor, "*batch"]:
        """tr W / d_h, over the eigenvalues that the rank of W leaves free."""
        return self.trace / self.d_head

    @property
    def variance_nonzero(self) -> Float[Tensor, "*batch"]:
        """tr W² / d_h − mean_nonzero²; may be negative, as `variance`."""
        return self.trace_of_square / self.d_head - self.mean_nonzero.square()

    @property
    def symmetry(self) -> Float[Tensor, "*batch"]:
        """tr W²/‖W‖²: 1 for a symmetric W, −1 for an antisymmetric one, 0 for W = 0 (arXiv 2502.10927)."""
        norm = self.frobenius_squared
        return torch.where(norm > 0, self.trace_of_square / norm.where(norm > 0, 1), 0)

    @property
    def eta_squared(self) -> Float[Tensor, "*batch"]:
        """η² = (tr W² + 2‖W‖²)/3, which is at least ‖W‖²/3 since tr W² ≥ −‖W‖²."""
        return eta_squared(self.trace_of_square, self.frobenius_squared).clamp_min(0)

    @property
    def eta(self) -> Float[Tensor, "*batch"]:
        """The scale η of the spectrum: √(tr W²) when W is symmetric, and defined when it is not."""
        return self.eta_squared.sqrt()

    @property
    def xi(self) -> Float[Tensor, "*batch"]:
        """ξ = tr W / η, mean over scale; 0 for W = 0."""
        scale = self.eta
        return torch.where(scale > 0, self.trace / scale.where(scale > 0, 1), 0)


def eta_squared(
    trace_of_square: Float[Tensor, "*batch"], frobenius_squared: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """(tr W² + 2‖W‖²)/3."""
    square, norm = ETA_WEIGHTS
    return (square * trace_of_square + norm * frobenius_squared) / (square + norm)


def moments(query: Float[Tensor, "*#batch d_head d_model"], key: Float[Tensor, "*#batch d_head d_model"]) -> Moments:
    """tr W = tr M, tr W² = Σ M∘M^T, ‖W‖² = Σ W_Q W_Q^T ∘ W_K W_K^T. Cost and precision of `grams`."""
    return moments_of(grams(query, key), d_model=query.shape[-1])


def moments_of(products: Grams, *, d_model: int) -> Moments:
    """Compute the moments from given products."""
    trace, square, norm = products.trace, products.trace_of_square, products.frobenius_squared
    if not all(bool(torch.isfinite(moment).all()) for moment in (trace, square, norm)):
        raise refusal("weights with finite moments", "an overflow", "give the weights as float64")
    return Moments(trace, square, norm, d_model=d_model, d_head=products.core.shape[-1])


def eigenvalues(
    query: Float[Tensor, "*#batch d_head d_model"], key: Float[Tensor, "*#batch d_head d_model"]
) -> Complex[Tensor, "*batch d_head"]:
    """The eigenvalues of the core M = W_K W_Q^T: those of W without d − d_h further zeros. Cost O(d·d_h² + d_h³)."""
    query, key = working(query, key)
    core = key @ query.mT
    if not bool(torch.isfinite(core).all()):
        raise refusal("weights with a finite core", "NaN or infinity", "check the weights")
    return torch.linalg.eigvals(core)


def spread(values: Complex[Tensor, "*batch d_head"], d_model: int) -> Float[Tensor, "*batch"]:
    """E|μ − m|² over all d eigenvalues: the given ones and d − d_h zeros."""
    mean = values.sum(-1) / d_model
    given = (values - mean[..., None]).abs().square().sum(-1)
    return (given + (d_model - values.shape[-1]) * mean.abs().square()) / d_model
