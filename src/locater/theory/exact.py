"""ρ_t without the Gaussian approximation: the logit is a quadratic form in Gaussians, and its law is inverted.

Tails of Q = Σ_j λ_j χ²_1 come from its moment generating function. Imhof's integral along the imaginary axis decays as
slowly as |s|^{-n/2-1}; on a hyperbola through the saddle point that wraps around a branch cut, the same integral falls
off exponentially and the trapezoid rule converges so too. For a long context ρ is evaluated at Chebyshev points of a
real t and interpolated, piecewise where it is sharp: it is analytic in t.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from ..errors import refusal
from ..spectra import Covariance, Moments
from . import closed_form
from .random_walk import Problem, prepare, walk_weights

# Largest number of matrix entries for which eigenvalues are taken at once (float64: 64 MiB).
ENTRIES_AT_ONCE = 2**23
# Step, block and truncation of the trapezoid rule: together they leave an error below 1e-10 (see the tests).
STEP = 0.12
BLOCK = 16
NEGLIGIBLE = 1e-16
# Beyond this |v| every factor of the integrand has underflowed, whatever the eigenvalues.
FARTHEST = 300.0
# The contour bends as the path of steepest descent does, within these limits: less and exp(−s x) would grow within
# the strip on which the trapezoid rule lives; more and many equal eigenvalues would make a hump beside the saddle.
LEAST_SLANT, MOST_SLANT, SLANT_OF_MANY = 0.45, 1.0, 6.0
# Saddle points nearer to the branch point than e^-23 belong to tails that underflow to 0.
NEAREST_TO_BRANCH = 23.0
# A largest eigenvalue below this share of the smallest one's magnitude is as good as zero.
SMALLEST_SHARE = 1e-30
# Intervals of the nested grids that are tried on a piece before it is cut in two.
GRIDS = (16, 32, 64)
# A piece with no more points than this is evaluated at all of them.
FEW = 24

Function = Callable[[Tensor], Tensor]


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
    """The propagation probabilities ρ_1 … ρ_T of every head, for any d_h and any asymmetry.

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

    answer = adaptive(lambda where: evaluate(form, where), positions, guide=guide, tolerance=tolerance)
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


def upper_tail(values: Float[Tensor, "batch n"], threshold: float) -> Float[Tensor, " batch"]:
    """P(Q > x) for x ≠ 0, from ascending eigenvalues of which one half is ≤ 0 and the other ≥ 0.

    P = (1/2πi) ∫ exp(K(s) − s x) ds/s with K(s) = −½ Σ log(1 − 2 s λ_j). Absolute error below 1e-10 for eigenvalues
    of any magnitude; cost O(n) per node and, unless n is small, about 48 nodes.
    """
    # The tail away from the mean is the one integrated. Seen from the mean's other side the pole at 0 crowds the
    # saddle, and the contour would follow the pole's scale instead of the distribution's.
    upward = threshold >= values.sum(-1)
    values = torch.where(upward[:, None], values, -values.flip(-1))
    beyond = threshold * torch.where(upward, 1.0, -1.0).to(values)
    largest = torch.maximum(values[:, -1], SMALLEST_SHARE * values[:, 0].abs())
    # Nothing left but zeros, or nothing that a float could tell from zero beside x.
    silent = largest <= abs(threshold) * torch.finfo(values.dtype).tiny
    unit = largest.where(~silent, 1)
    # In units of the branch point 1/(2 λ_max) every saddle lies in (0, 1) and nothing overflows.
    tail = _outer_tail(values / unit[:, None], beyond / (2 * unit)).where(~silent, 0)
    return torch.where(upward, tail, 1 - tail).clamp(0, 1)


def _outer_tail(relative: Float[Tensor, "batch n"], beyond: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """The integral over u = 2 λ_max s, along u(v) = c + w(κ(cosh v − 1) + i sinh v).

    c is the saddle point, w its width, so that the pole at 0 and the branch point at 1 are at least w and w/√2 away.
    κ follows the third derivative there, and bends the contour to the side where exp(−u x) decays.
    """
    centre = _saddle(relative, beyond)
    pull = relative / (1 - centre[:, None] * relative)
    curvature = 0.5 * pull.square().sum(-1) + centre.reciprocal().square()
    skewness = pull.pow(3).sum(-1) - 2 * centre.reciprocal().pow(3)
    least = min(LEAST_SLANT, SLANT_OF_MANY / math.sqrt(relative.shape[-1]))
    natural = beyond.sign() * skewness / (3 * curvature.pow(1.5))
    slant = beyond.sign() * natural.clamp(least, MOST_SLANT)
    return _trapezoid(relative, beyond, centre=centre, width=curvature.rsqrt(), slant=slant)


def _saddle(relative: Float[Tensor, "batch n"], beyond: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """The minimum on (0, 1) of the convex exponent K(u) − u x − log u, by bisection of its slope in logit(u).

    It lies right of 1/(1 + n) in units of the largest |eigenvalue|, for the pole's slope −1/u outweighs all n there.
    """
    count, share = relative.shape[-1], relative.abs().amax(-1)
    low = -share.log() - math.log(1 + count) - 1
    high = torch.full_like(low, NEAREST_TO_BRANCH)
    for _ in range(50):
        middle = (low + high) / 2
        point, rest = torch.sigmoid(middle)[:, None], torch.sigmoid(-middle)[:, None]
        slope = 0.5 * (relative / (rest + point * (1 - relative))).sum(-1) - beyond - 1 / point[:, 0]
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    return torch.sigmoid((low + high) / 2)


def _trapezoid(
    relative: Float[Tensor, "batch n"],
    beyond: Float[Tensor, " batch"],
    *,
    centre: Float[Tensor, " batch"],
    width: Float[Tensor, " batch"],
    slant: Float[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    """(1/π) ∫_0^∞ Im(exp(K(u) − u x) u'/u) dv, block by block until all of the batch has decayed."""
    pairs = relative.shape[-1] // 2
    negative, positive = relative[:, :pairs].clamp_max(0), relative.flip(-1)[:, :pairs].clamp_min(0)
    linear, quadratic = -(negative + positive), negative * positive
    rise_width, run_width = width[:, None], (width * slant)[:, None]
    total = torch.zeros_like(centre)
    for start in range(0, int(FARTHEST / STEP), BLOCK):
        index = torch.arange(start, start + BLOCK, device=centre.device, dtype=centre.dtype)
        rise, run = torch.sinh(STEP * index), torch.cosh(STEP * index)
        point = torch.complex(centre[:, None] + run_width * (run - 1), rise_width * rise)
        velocity = torch.complex(run_width * rise, rise_width * run)
        terms = _exponential(point, beyond, linear=linear, quadratic=quadratic) / point * velocity
        total = total + (terms.imag * torch.where(index == 0, 0.5, 1.0)).sum(-1)
        if bool((terms[:, -1].abs() < NEGLIGIBLE).all()):
            break
    return total * STEP / math.pi


def _exponential(
    point: Complex[Tensor, "batch nodes"],
    beyond: Float[Tensor, " batch"],
    *,
    linear: Float[Tensor, "batch pairs"],
    quadratic: Float[Tensor, "batch pairs"],
) -> Complex[Tensor, "batch nodes"]:
    """exp(K(u) − u x). One eigenvalue of either sign per factor: their arguments then cancel within (−π, π).

    So one principal logarithm serves two eigenvalues and never jumps to another branch.
    """
    factors = 1 + point[:, None] * (linear[..., None] + point[:, None] * quadratic[..., None])
    return torch.exp(-0.5 * factors.log().sum(-2) - point * beyond[:, None])


def adaptive(
    function: Function, positions: Float[Tensor, " positions"], *, guide: Function, tolerance: float
) -> Float[Tensor, " positions"]:
    """f at ascending `positions`, from as few evaluations as give the tolerance; from all of them at tolerance 0.

    The error of a grid is read off at its own new points, against the interpolant of the grid half as fine; the grid
    itself is then far better than that, since convergence is geometric. A `guide` that shares the features of f and
    costs nothing says where to start and where to cut, lest a feature between the first points be missed.
    """
    if tolerance == 0 or len(positions) <= FEW:
        return function(positions)
    piece = _one_piece(function, positions, guide=guide, tolerance=tolerance)
    if piece is not None:
        return piece
    halves = positions.tensor_split(2)
    return torch.cat([adaptive(function, half, guide=guide, tolerance=tolerance) for half in halves])


def _one_piece(
    function: Function, positions: Float[Tensor, " positions"], *, guide: Function, tolerance: float
) -> Float[Tensor, " positions"] | None:
    """The first grid that fits the guide and then the function itself; None if there is none."""
    values, wanted = None, guide(positions)
    for num_intervals in GRIDS:
        nodes = _nodes(positions, num_intervals)
        fits = float((_interpolate(nodes, guide(nodes), positions) - wanted).abs().max()) <= tolerance
        if num_intervals + 1 >= len(positions) or not (fits or values is not None):
            continue
        values = function(nodes) if values is None else _refined(values, function(nodes[1::2]))
        coarse = _interpolate(nodes[::2], values[::2], nodes[1::2])
        if float((coarse - values[1::2]).abs().max()) <= tolerance:
            return _interpolate(nodes, values, positions)
    return None


def _refined(values: Float[Tensor, " coarse"], between: Float[Tensor, " gaps"]) -> Float[Tensor, " fine"]:
    """The values on a grid twice as fine, whose new points lie between the old ones."""
    finer = values.new_empty(len(values) + len(between))
    finer[::2], finer[1::2] = values, between
    return finer


def _interpolate(
    nodes: Float[Tensor, " nodes"], values: Float[Tensor, " nodes"], positions: Float[Tensor, " positions"]
) -> Float[Tensor, " positions"]:
    """The barycentric formula at Chebyshev–Lobatto points; O(nodes × positions), stable at any degree."""
    sign = 1.0 - 2.0 * (torch.arange(len(nodes), device=nodes.device) % 2)
    sign[0], sign[-1] = sign[0] / 2, sign[-1] / 2
    gaps = positions[:, None] - nodes
    hit = gaps == 0
    weights = sign / gaps.where(~hit, 1)
    smooth = (weights @ values) / weights.sum(-1)
    return torch.where(hit.any(-1), values[hit.long().argmax(-1)], smooth)


def _nodes(positions: Float[Tensor, " positions"], num_intervals: int) -> Float[Tensor, " nodes"]:
    first, last = positions[0], positions[-1]
    angle = torch.arange(num_intervals + 1, device=positions.device, dtype=positions.dtype) * (math.pi / num_intervals)
    return (first + last) / 2 - (last - first) / 2 * torch.cos(angle)
