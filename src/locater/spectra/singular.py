"""Singular values of W = W_K^T W_Q through d_h×d_h Gram matrices: how far it can stretch an input."""

import torch
from jaxtyping import Float
from torch import Tensor

from .grams import Grams, working


def singular_values(
    query: Float[Tensor, "*#batch rank d_model"], key: Float[Tensor, "*#batch rank d_model"]
) -> Float[Tensor, "*batch rank"]:
    """The non-zero ones, the largest first: σ² are the eigenvalues of L^T (W_K W_K^T) L, W_Q W_Q^T = L L^T.

    Costs two products of O(d·r²) and O(r³) for rows r; nothing of size d×d. Those below √ε of the largest are lost.
    NaN where the weights are not finite.
    """
    query, key = working(query, key)
    return _through(query @ query.mT, key @ key.mT)


def largest_singular_value(products: Grams) -> Float[Tensor, "*batch"]:
    """σ₁(W) from products that are at hand already.

    Absolute error about √ε σ₁(W_Q) σ₁(W_K), which is felt only where queries and keys hardly meet.
    """
    root = _root(products.query)
    return _largest(root.mT @ products.key @ root)


def side_norms(products: Grams) -> tuple[Float[Tensor, "*#batch"], Float[Tensor, "*#batch"]]:
    """σ₁(W_Q) and σ₁(W_K); their product bounds σ₁(W_K^T R W_Q) for every rotation R."""
    return _largest(products.query), _largest(products.key)


def _largest(form: Float[Tensor, "*batch rank rank"]) -> Float[Tensor, "*batch"]:
    return torch.linalg.eigvalsh(form)[..., -1].clamp_min(0).sqrt()


def _root(gram: Float[Tensor, "*batch rank rank"]) -> Float[Tensor, "*batch rank rank"]:
    """L with L L^T = G, by Cholesky; by eigenvectors where rounding or a low rank leaves G without a positive pivot."""
    root, failed = torch.linalg.cholesky_ex(gram)
    if not bool(failed.any()):
        return root
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp_min(0).sqrt()[..., None, :]


def _through(
    left: Float[Tensor, "*#batch rank rank"], right: Float[Tensor, "*#batch rank rank"]
) -> Float[Tensor, "*batch rank"]:
    left, right = left.double(), right.double()
    finite = (left.isfinite().all(-1) & right.isfinite().all(-1)).all(-1)
    identity = torch.eye(left.shape[-1], dtype=left.dtype, device=left.device)
    left, right = (gram.where(finite[..., None, None], identity) for gram in (left, right))
    factor = _root(left)
    squares = torch.linalg.eigvalsh(factor.mT @ right @ factor).flip(-1).clamp(min=0)
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
