"""Singular values of W = W_K^T W_Q through d_h×d_h Gram matrices: how far it can stretch an input."""

import torch
from jaxtyping import Float
from torch import Tensor

from .grams import Grams, working


def largest_singular_value(products: Grams) -> Float[Tensor, "*batch"]:
    """Compute σ₁(W) from given products, to a millionth.

    Absolute error about √ε σ₁(W_Q) σ₁(W_K), which is felt only where queries and keys hardly meet.
    """
    root = _root(products.query)
    return _root_of_largest(root.mT @ products.key @ root, most=ENOUGH)


def side_norms(products: Grams) -> tuple[Float[Tensor, "*#batch"], Float[Tensor, "*#batch"]]:
    """Upper bounds of σ₁(W_Q) and σ₁(W_K), at most d_h^(1/128) times too large.

    Their product bounds σ₁(W_K^T R W_Q) for every rotation R.
    """
    return _root_of_largest(products.query, most=3), _root_of_largest(products.key, most=3)


# After this many rounds d_h^(1/4^12) is 1 to float32.
CLOSE, ENOUGH = 1e-6, 12


def _root_of_largest(form: Float[Tensor, "*batch rank rank"], *, most: int) -> Float[Tensor, "*batch"]:
    """√λ₁ of matrices A without negative eigenvalues, from above, by squaring: cheaper than their eigenvalues.

    (tr A^4m/tr A^m)^(1/3m) ≤ λ₁ ≤ (tr A^4m)^(1/4m), which differ by p^(−1/12m) where p = tr A^4m/(tr A^m)^4. A round
    takes m to 4m; the last is the `most`-th, or the one after which the two are `CLOSE`.
    """
    trace = form.diagonal(dim1=-2, dim2=-1).sum(-1)
    tiny = torch.finfo(form.dtype).tiny
    form = form / trace.clamp_min(tiny)[..., None, None]
    logarithm = trace.clamp_min(tiny).double().log()
    for fold in range(1, most + 1):
        form = form @ form
        share = torch.linalg.vector_norm(form, dim=(-2, -1)).square().clamp_min(tiny)
        step = share.double().log() / 4**fold
        logarithm = logarithm + step
        if fold == most or -float(step.min()) <= 3 * CLOSE:
            break
        form = (form @ form).div_(share[..., None, None])
    return torch.where(trace > 0, (logarithm / 2).exp(), 0).to(form)


def _root(gram: Float[Tensor, "*batch rank rank"]) -> Float[Tensor, "*batch rank rank"]:
    """L with L L^T = G, by Cholesky; by eigenvectors where rounding or a low rank leaves G without a positive pivot."""
    root, failed = torch.linalg.cholesky_ex(gram)
    if not bool(failed.any()):
        return root
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp_min(0).sqrt()[..., None, :]


def singular_values_of_grams(
    query: Float[Tensor, "*#batch rank rank"],
    key: Float[Tensor, "*#batch rank rank"],
    *,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "*batch rank"]:
    """σ² are the eigenvalues of L^T (W_K W_K^T) L, where W_Q W_Q^T = L L^T: O(r³), nothing of size d×d.

    Those below √ε of the largest are lost, ε of the `dtype` that eigenvalues are taken in. NaN where not finite.
    """
    query, key = query.double(), key.double()
    finite = (query.sum((-2, -1)) + key.sum((-2, -1))).isfinite()[..., None, None]
    identity = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
    factor = _root(query.where(finite, identity))
    core = (factor.mT @ key @ factor).where(finite, identity)
    size = core.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None].clamp(min=torch.finfo(torch.float64).tiny)
    squares = torch.linalg.eigvalsh((core / size[..., None]).to(dtype)).flip(-1).clamp(min=0).double() * size
    return squares.sqrt().where(finite[..., 0], torch.nan)


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
    """Compute singular values of ΔW = W_K^T W_Q − (the same before): at most 2 d_h, no d×d matrix, no cancellation.

    ΔW = ΔW_K^T W_Q + W_K,before^T ΔW_Q, a product of the factors stacked. Eigenvalues are taken in float32: what is
    asked of them are shares of their sum.
    """
    (query, key), (query_before, key_before) = working(query, key), working(query_before, key_before)
    left, right = _stacked(query, query - query_before), _stacked(key - key_before, key_before)
    return singular_values_of_grams(left, right, dtype=torch.float32)


def _stacked(one: Tensor, other: Tensor) -> Tensor:
    """The Gram matrix of two factors one above the other, block by block: what is symmetric is made once."""
    cross = one @ other.mT
    rows = torch.cat([one @ one.mT, cross], -1), torch.cat([cross.mT, other @ other.mT], -1)
    return torch.cat(rows, -2)
