"""ρ_t with the random walk replaced: stationary Gaussian tokens of a measured mean m and lag covariance Γ(Δ).

The key at t is a_t = R_{t−T}(W_K x_t + b_K), the query b = W_Q x_T + b_Q, and ω_t − ω̄ = u_t·b/λ with u_t = a_t − ā. For
jointly Gaussian u and b of means μ, β, covariances U, B and cross-covariance X = cov(u, b),

    mean      μ·β + tr X
    variance  tr UB + tr XX + β·Uβ + μ·Bμ + 2 μ·X^Tβ.

Rotary positions are diagonal in a unitary basis, where the sums over the context become prefix sums over lags.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from locater.errors import refusal
from locater.theory.closed_form import mass_between
from locater.theory.random_walk import Turns, check_temperature


class HeadInputs(NamedTuple):
    """Means and covariances of what one head makes of its inputs, biases included, before positions turn it.

    Row Δ of `keys` is W_K Γ(Δ) W_K^T, of `crossed` W_Q Γ(Δ) W_K^T, for Δ = 0 … T−1: the later token comes first.
    """

    query_mean: Float[Tensor, " d_head"]
    key_mean: Float[Tensor, " d_head"]
    query_covariance: Float[Tensor, "d_head d_head"]
    keys: Float[Tensor, "length d_head d_head"]
    crossed: Float[Tensor, "length d_head d_head"]

    @property
    def length(self) -> int:
        """T, as many tokens as there are lags."""
        return len(self.keys)


class LogitMoments(NamedTuple):
    """Mean and variance of λ(ω_t − ω̄) at t = 1 … T."""

    mean: Float[Tensor, " length"]
    variance: Float[Tensor, " length"]


def profile(
    inputs: HeadInputs, *, temperature: float | None = None, turns: Turns | None = None
) -> Float[Tensor, " length"]:
    """Return ρ_1 … ρ_T for the query at T, the logit taken as Gaussian; λ is √d_h unless given."""
    mean, variance = logit_moments(inputs, turns)
    scale = check_temperature(temperature, len(inputs.key_mean))
    return mass_between(-scale, (inputs.length - 1) * scale, mean=mean, variance=variance)


def expected_attention(
    inputs: HeadInputs, *, temperature: float | None = None, turns: Turns | None = None
) -> Float[Tensor, " length"]:
    """Return E S(ω)_t = E clip((1 + ω_t − ω̄)/T, 0, 1): the clipped softmax's own attention, in the same closed form.

    With z ~ N(μ, v): E max(1 + z, 0) − E max(1 + z − T, 0), each (μ + c) Φ((μ + c)/√v) + √v φ((μ + c)/√v).
    """
    mean, variance = logit_moments(inputs, turns)
    scale = check_temperature(temperature, len(inputs.key_mean))
    deviation = variance.clamp_min(0).sqrt() / scale
    upper = 1 + mean / scale
    return (_mean_above_zero(upper, deviation) - _mean_above_zero(upper - inputs.length, deviation)) / inputs.length


def _mean_above_zero(mean: Float[Tensor, " length"], deviation: Float[Tensor, " length"]) -> Float[Tensor, " length"]:
    """Return E max(z, 0) of z ~ N(mean, deviation²)."""
    ratio = mean / deviation.clamp_min(1e-12)
    density = torch.exp(-ratio.square() / 2) / math.sqrt(2 * math.pi)
    return mean * torch.special.ndtr(ratio) + deviation * density


def logit_moments(inputs: HeadInputs, turns: Turns | None = None) -> LogitMoments:
    """Return the moments of the centred logits of the last query. Cost O(T d_h²) and d_h³, memory O(T d_h²)."""
    _check(inputs)
    basis, phases = _turning_basis(len(inputs.key_mean), turns)
    offsets = torch.arange(1 - inputs.length, 1, dtype=torch.float64)[:, None]
    powers = torch.polar(torch.ones_like(offsets * phases), offsets * phases)  # the key at t is turned by z^{t−T}
    mean = powers * (basis @ inputs.key_mean.to(basis))
    mean = mean - mean.mean(0)
    own = _centred_covariances(basis @ inputs.keys.to(basis) @ basis.mH, powers, phases)
    crossed = powers[:, :, None] * (basis @ inputs.crossed.flip(0).mT.to(basis) @ basis.mH)
    crossed = crossed - crossed.mean(0)
    beta, spread = basis @ inputs.query_mean.to(basis), basis @ inputs.query_covariance.to(basis) @ basis.mH
    centre = mean @ beta.conj() + crossed.diagonal(dim1=-2, dim2=-1).sum(-1)
    products = (own * spread.mT).sum((-2, -1)) + (crossed * crossed.mT).sum((-2, -1))
    of_means = own @ beta @ beta.conj() + (mean.conj() * (mean @ spread.mT)).sum(-1)
    mixed = ((beta.conj() @ crossed) * mean).sum(-1)
    return LogitMoments(centre.real, (products + of_means + 2 * mixed).real)


def _centred_covariances(
    keys: Complex[Tensor, "length d_head d_head"],
    powers: Complex[Tensor, "length d_head"],
    phases: Float[Tensor, " d_head"],
) -> Complex[Tensor, "length d_head d_head"]:
    """Return U_t = cov(a_t − ā) of all t.

    cov(a_t, ā)_ij = z_i^{t−T} z_j^{T−t} (1/T) Σ_Δ K(Δ)_ij z_j^Δ, Δ from t − T to t − 1: a difference of prefix sums.
    """
    length = len(keys)
    lags = torch.arange(1 - length, length, dtype=torch.float64)[:, None] * phases
    both_ways = torch.cat([keys[1:].flip(0).mH, keys]) * torch.polar(torch.ones_like(lags), lags)[:, None, :]
    sums = torch.cat([torch.zeros_like(both_ways[:1]), both_ways.cumsum(0)])
    turned = powers[:, :, None] * powers.conj()[:, None, :]
    with_mean = turned * (sums[length:] - sums[:length]) / length
    return turned * keys[0] - with_mean - with_mean.mH + with_mean.mean(0)


def _turning_basis(
    d_head: int, turns: Turns | None
) -> tuple[Complex[Tensor, "d_head d_head"], Float[Tensor, " d_head"]]:
    """Return rows in which positions only change phases, (e_i ± i e_j)/√2 for each pair, and these phases per token."""
    basis = torch.eye(d_head, dtype=torch.complex128)
    phases = torch.zeros(d_head, dtype=torch.float64)
    if turns is None:
        return basis, phases
    first, second = turns.pairs.unbind(-1)
    size = torch.tensor(turns.amplitude / math.sqrt(2), dtype=torch.complex128)
    basis[first, first], basis[first, second] = size, 1j * size
    basis[second, first], basis[second, second] = size, -1j * size
    phases[first], phases[second] = turns.frequencies.double(), -turns.frequencies.double()
    return basis, phases


def _check(inputs: HeadInputs) -> None:
    if inputs.length < 2:
        raise refusal("lag covariances of at least two tokens", inputs.length)
    if not all(bool(torch.isfinite(part).all()) for part in inputs):
        raise refusal("finite means and covariances", "NaN or infinity")
