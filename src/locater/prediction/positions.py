"""How the mean input depends on the position, told from the noise of having seen few windows."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.input_moments import InputMoments
from .gaussian import Gaussian

NOISE = 1e-4  # directions with less than this share of the mean variance are not looked at


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
