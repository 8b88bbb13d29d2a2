"""How the mean input depends on the position, told from the noise of having seen few windows."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.moments import InputMoments
from .inputs import Inputs


def position_offsets(inputs: Inputs) -> Float[Tensor, "tokens d_model"] | None:
    """m_t − m, kept in the directions where it stands out; None where it does nowhere.

    In units of the noise, √n_t Σ^{-1/2}(m̂_t − m), a matrix of pure noise has no singular value above √T + √d: what
    exceeds it is kept, shrunk to the size it has without the noise. Cost: one T×d singular value decomposition.
    """
    counts = inputs.position_counts[:, None].clamp(min=1)
    seen = inputs.position_counts[:, None] > 0
    raw = ((inputs.position_sums / counts - inputs.ordinary.mean) * seen).double()
    values, vectors = torch.linalg.eigh(inputs.ordinary.lagged(0))
    kept = values > 1e-4 * values.mean()
    scale, vectors = values[kept].sqrt(), vectors[:, kept]
    white = raw @ vectors / scale * counts.sqrt()
    left, singular, right = torch.linalg.svd(white, full_matrices=False)
    num_rows, num_columns = int(seen.sum()), len(scale)
    signal = _without_noise(singular, num_rows, num_columns)
    if not bool((signal > 0).any()):
        return None
    return ((left * signal) @ right / counts.sqrt() * scale @ vectors.mT).float()


def without_offsets(lagged: InputMoments, offsets: Float[Tensor, "tokens d_model"]) -> InputMoments:
    """The lagged covariances around the mean of each position: Γ(Δ) less the mean of (m_t − m)(m_{t−Δ} − m)^T."""
    offsets = offsets.double()
    inside = offsets if lagged.basis is None else offsets @ lagged.basis
    length = len(inside)
    parts = [inside[lag:].mT @ inside[: length - lag] / (length - lag) for lag in lagged.lags]
    return replace(lagged, core=lagged.core - torch.stack(parts))


def _without_noise(singular: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """The optimal shrinkage for squared error (Gavish & Donoho 2017, arXiv 1405.7511)."""
    edge = num_rows**0.5 + num_columns**0.5
    square = singular.square()
    inner = (square - num_rows - num_columns).square() - 4 * num_rows * num_columns
    return torch.where(singular > edge, inner.clamp(min=0).sqrt() / singular, 0)

