"""Singular values of W = W_K^T W_Q through d_h×d_h Gram matrices: how far it can stretch an input."""

import torch
from jaxtyping import Float
from torch import Tensor

from .grams import working


def singular_values(
    query: Float[Tensor, "*#batch rank d_model"], key: Float[Tensor, "*#batch rank d_model"]
) -> Float[Tensor, "*batch rank"]:
    """The non-zero ones, the largest first: σ² are the eigenvalues of L^T (W_K W_K^T) L, W_Q W_Q^T = L L^T.

    Costs two products of O(d·r²) and O(r³) for rows r; nothing of size d×d. Those below √ε of the largest are lost.
    NaN where the weights are not finite.
    """
    query, key = working(query, key)
    return _through(query @ query.mT, key @ key.mT)


def _through(
    left: Float[Tensor, "*#batch rank rank"], right: Float[Tensor, "*#batch rank rank"]
) -> Float[Tensor, "*batch rank"]:
    left, right = left.double(), right.double()
    finite = (left.isfinite().all(-1) & right.isfinite().all(-1)).all(-1)
    # A row that depends on the others would make the factor fail; this much of the trace is below what is lost anyway.
    ridge = 1e-12 * left.diagonal(dim1=-2, dim2=-1).sum(-1) + torch.finfo(torch.float64).tiny
    identity = torch.eye(left.shape[-1], dtype=left.dtype, device=left.device)
    left = (left + ridge[..., None, None] * identity).where(finite[..., None, None], identity)
    factor = torch.linalg.cholesky_ex(left).L
    core = (factor.mT @ right @ factor).where(finite[..., None, None], identity)
    squares = torch.linalg.eigvalsh(core).flip(-1).clamp(min=0)
    return squares.sqrt().where(finite[..., None], torch.nan)


def stable_rank(sigma: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """‖W‖_F² / σ₁²: in how many directions W acts, the largest counting most."""
    return sigma.square().sum(-1) / sigma[..., 0].square()


def spectral_entropy(sigma: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch"]:
    """−Σ p log p of p = σ²/Σσ², over log of their number: 0 for rank one, 1 for all alike."""
    p = sigma.square() / sigma.square().sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1) / torch.log(torch.tensor(float(sigma.shape[-1])))


def update_singular_values(
    query: Float[Tensor, "*batch rank d_model"],
    key: Float[Tensor, "*batch rank d_model"],
    query_before: Float[Tensor, "*batch rank d_model"],
    key_before: Float[Tensor, "*batch rank d_model"],
) -> Float[Tensor, "*batch twice"]:
    """Of ΔW = W_K^T W_Q − (the same before), at most 2 d_h of them, without cancellation and without a d×d matrix.

    ΔW = ΔW_K^T W_Q + W_K,before^T ΔW_Q, a product of the factors stacked.
    """
    (query, key), (query_before, key_before) = working(query, key), working(query_before, key_before)
    left = torch.cat([query, query - query_before], -2)
    right = torch.cat([key - key_before, key_before], -2)
    return _through(left @ left.mT, right @ right.mT)
