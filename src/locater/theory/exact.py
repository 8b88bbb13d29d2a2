"""ρ_t without the Gaussian approximation: the logit is a quadratic form in Gaussians, and its law is inverted.

For a long context ρ is evaluated at Chebyshev points of a real t and interpolated: it is analytic in t.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from ..spectra import Covariance, Moments
from . import closed_form, interpolation
from .quadratic_form import upper_tail
from .random_walk import Problem, prepare, walk_weights

# Largest number of matrix entries for which eigenvalues are taken at once (float64: 64 MiB).
ENTRIES_AT_ONCE = 2**23


class CanonicalForm(NamedTuple):
    """ω_t − ω̄ = ã^T N b̃ scaled by `unit`, where ã, b̃ are Gaussian and only entries of equal index correlate."""

    product: Float[Tensor, "d_head d_head"]
    correlation: Float[Tensor, " d_head"]
    unit: float
    length: int
    temperature: float


def profile(
    query: Float[Tensor, "*#batch d_head d_model"],
    key: Float[Tensor, "*#batch d_head d_model"],
    *,
    length: int,
    temperature: float | None = None,
    covariance: Covariance = 1.0,
    tolerance: float = 1e-6,
) -> Float[Tensor, "*batch {length}"]:
    """ρ_1 … ρ_T of every head, for any d_h and any asymmetry.

    Per evaluated t the eigenvalues of one 2d_h×2d_h symmetric matrix, O(d_h³), in float64. With a tolerance of 0
    every t is evaluated (absolute error near 1e-12); else as few as the tolerance lets the interpolant have.
    """
    problem = prepare(query, key, length=length, temperature=temperature, covariance=covariance)
    profiles = [_head_profile(head, tolerance) for head in problem.heads()]
    return torch.stack(profiles).reshape(*problem.batch, length)


def _head_profile(head: Problem, tolerance: float) -> Float[Tensor, " length"]:
    query, key = head.query.double(), head.key.double()
    form = canonical_form(query, key, length=head.length, temperature=head.temperature)
    positions = torch.arange(1, head.length + 1, dtype=torch.float64, device=query.device)
    spectrum, scale = _moments(form), head.temperature / form.unit

    def guide(where: Tensor) -> Tensor:
        # Cheap at every t, so it shows a narrow window that would fall between the first few points.
        return closed_form.at(where, spectrum, length=head.length, temperature=scale)

    answer = interpolation.adaptive(lambda where: evaluate(form, where), positions, guide=guide, tolerance=tolerance)
    return answer.clamp(0, 1)


def canonical_form(
    query: Float[Tensor, "d_head d_model"], key: Float[Tensor, "d_head d_model"], *, length: int, temperature: float
) -> CanonicalForm:
    """Reduce the head to what the logit sees: keys a = W_K u and queries b = W_Q v, with u = Σ c_s ε_s, v = Σ ε_s.

    With W_K^T = O_K R_K, W_Q^T = O_Q R_Q and the singular values O_K^T O_Q = U σ V^T, the rotated U^T O_K^T u and
    V^T O_Q^T v have covariances ‖c‖² I and T I and cross-covariance Σc·diag(σ); N = U^T R_K R_Q^T V. So 2d_h
    Gaussians suffice, where the rows of W_Q and W_K in the model's space would take twice as many or more.
    """
    key_basis, key_factor = torch.linalg.qr(key.mT)
    query_basis, query_factor = torch.linalg.qr(query.mT)
    left, correlation, right = torch.linalg.svd(key_basis.mT @ query_basis)
    product = left.mT @ key_factor @ query_factor.mT @ right.mT
    unit = float(product.abs().max())
    if not unit < torch.inf:
        raise refusal("weights whose products are finite", "an overflow", "scale the weights down")
    unit = unit or 1.0
    return CanonicalForm(product / unit, correlation.clamp(0, 1), unit, length, temperature)


def evaluate(form: CanonicalForm, positions: Float[Tensor, " positions"]) -> Float[Tensor, " positions"]:
    """ρ_t = 1 − P(Q ≤ −1) − P(Q ≥ T−1) at any real t from 1 to T; 0 at T = 1, where the interval is empty."""
    if form.length == 1:
        return torch.zeros_like(positions)
    threshold = form.temperature / form.unit
    parts = []
    for part in positions.split(max(1, ENTRIES_AT_ONCE // (2 * len(form.correlation)) ** 2)):
        values = torch.linalg.eigvalsh(form_matrices(form, part))
        below = upper_tail(-values.flip(-1), threshold)
        above = upper_tail(values, (form.length - 1) * threshold)
        parts.append((1 - below - above).clamp(0, 1))
    return torch.cat(parts)


def form_matrices(
    form: CanonicalForm, positions: Float[Tensor, " positions"]
) -> Float[Tensor, "positions d_head_twice d_head_twice"]:
    """The lower triangles of [[sym(D_s N), ·], [½ D_r N, 0]], s = Σc·σ and r² = T‖c‖² − s², for every t.

    b̃ = √T h and √T ã = s∘h + r∘g with h, g standard normal. The zero block makes the inertia (d_h, d_h).
    """
    total, squares = walk_weights(positions, form.length)
    shared = total[:, None] * form.correlation
    own = (squares[:, None] - shared.square()).clamp_min(0).sqrt()
    size = len(form.correlation)
    matrices = torch.zeros(len(positions), 2 * size, 2 * size, dtype=shared.dtype, device=shared.device)
    upper_left = shared[..., None] * form.product
    matrices[:, :size, :size] = (upper_left + upper_left.mT) / 2
    matrices[:, size:, :size] = own[..., None] * form.product / 2
    return matrices


def _moments(form: CanonicalForm) -> Moments:
    """The moments of the form itself: W = N diag(σ) in trace and square, N in the norm."""
    crossed = form.correlation[:, None] * form.product
    size = len(form.correlation)
    square = (crossed * crossed.mT).sum()
    return Moments(crossed.trace(), square, form.product.square().sum(), d_model=size, d_head=size)
