"""Gaussian tokens of given moments, around a mean that may depend on the position.

What positions do to the mean is told from the noise of having seen few windows.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.input_moments import InputMoments

SMALLEST = 1e-6  # eigenvalues of a covariance below this share of the mean one are rounding
NOISE = 1e-4  # directions with less than this share of the mean variance are not looked at


@dataclass(frozen=True, eq=False)
class Gaussian:
    """mean + root · z + residual ∘ z', z and z' white: the covariance is root rootᵀ + residual²."""

    mean: Float[Tensor, " d_model"]
    root: Float[Tensor, "d_model rank"]
    residual: Float[Tensor, " d_model"] | None = None

    def draw(self, count: int, generator: torch.Generator) -> Float[Tensor, "count d_model"]:
        drawn = self.mean + torch.randn(count, self.root.shape[1], generator=generator) @ self.root.mT
        if self.residual is None:
            return drawn
        return drawn + self.residual * torch.randn(drawn.shape, generator=generator)


def of_tokens(tokens: Float[Tensor, "count d_model"]) -> Gaussian:
    """The Gaussian of a few tokens: centred and over √count, they are a root of their covariance themselves."""
    mean = tokens.mean(0)
    return Gaussian(mean, (tokens - mean).mT / len(tokens) ** 0.5)


def of_moments(moments: InputMoments) -> Gaussian:
    """The Gaussian of these moments, its root in principal directions; one r×r eigenvalue problem."""
    values, vectors = torch.linalg.eigh(moments.core[0])
    kept = values > SMALLEST * values.clamp(min=0).mean()
    root = vectors[:, kept] * values[kept].sqrt()
    root = root if moments.basis is None else moments.basis @ root
    residual = None if moments.residual is None else moments.residual.sqrt().float()
    return Gaussian(moments.mean.float(), root.float(), residual)


def position_offsets(
    by_position: Float[Tensor, "tokens d_model"], counts: Float[Tensor, " tokens"], ordinary: Gaussian
) -> Float[Tensor, "tokens d_model"] | None:
    """m_t − m, kept in the directions where it stands out; None where it does nowhere.

    In units of the noise, √n_t Σ^{-1/2}(m̂_t − m), a matrix of pure noise has no singular value above √T + √d: what
    exceeds it is kept, shrunk to the size it has without the noise. Cost: one T×d singular value decomposition.
    """
    variances = ordinary.root.square().sum(0)
    root = ordinary.root[:, variances > NOISE * variances.mean()]
    weight = counts.sqrt()[:, None]
    white = weight * ((by_position - ordinary.mean) @ (root / root.square().sum(0)))
    left, singular, right = torch.linalg.svd(white, full_matrices=False)
    signal = _without_noise(singular, int((counts > 0).sum()), root.shape[1])
    if not bool((signal > 0).any()):
        return None
    return ((left * signal) @ right / weight.clamp(min=1)) @ root.mT


def _without_noise(singular: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """The shrinkage with the least squared error (Gavish & Donoho 2017, arXiv 1405.7511)."""
    inner = (singular.square() - num_rows - num_columns).square() - 4 * num_rows * num_columns
    edge = num_rows**0.5 + num_columns**0.5
    return torch.where(singular > edge, inner.clamp(min=0).sqrt() / singular, 0)


def around_offsets(ordinary: Gaussian, offsets: Float[Tensor, "tokens d_model"]) -> Gaussian:
    """The Gaussian less the part of its covariance that the offsets make up: Σ − mean of (m_t − m)(m_t − m)ᵀ."""
    white = offsets @ (ordinary.root / ordinary.root.square().sum(0))
    rest = torch.eye(white.shape[1]) - white.mT @ white / len(white)
    values, vectors = torch.linalg.eigh(rest)
    return replace(ordinary, root=ordinary.root @ (vectors * values.clamp(min=0).sqrt()))


def lags_around_offsets(lagged: InputMoments, offsets: Float[Tensor, "tokens d_model"]) -> InputMoments:
    """The lagged covariances around the mean of each position: Γ(Δ) − mean of (m_t − m)(m_{t−Δ} − m)ᵀ."""
    inside = offsets.double()
    inside = inside if lagged.basis is None else inside @ lagged.basis
    parts = [inside[lag:].mT @ inside[: len(inside) - lag] / (len(inside) - lag) for lag in lagged.lags]
    return replace(lagged, core=lagged.core - torch.stack(parts))
