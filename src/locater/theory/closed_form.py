"""The signal propagation probability ρ_t with the logit taken as Gaussian: good for large d_h, exact in its moments."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from ..spectra import Covariance, Moments, moments
from .random_walk import check_length, check_temperature, prepare, walk_weights


def profile(
    query: Float[Tensor, "*#batch d_head d_model"],
    key: Float[Tensor, "*#batch d_head d_model"],
    *,
    length: int,
    temperature: float | None = None,
    covariance: Covariance = 1.0,
) -> Float[Tensor, "*batch {length}"]:
    """ρ_1 … ρ_T of every head; λ is √d_h unless given. Cost: the three moments, then O(T).

    The Gaussian stands for a sum of 2 d_h weighted χ² variables, so at d_h below about 16 it errs by 0.1 and more.
    """
    problem = prepare(query, key, length=length, temperature=temperature, covariance=covariance)
    return from_moments(moments(problem.query, problem.key), length=length, temperature=problem.temperature)


def from_moments(
    spectrum: Moments,
    *,
    length: int,
    temperature: float | None = None,
    bias: Float[Tensor, "*#batch {length}"] | None = None,
) -> Float[Tensor, "*batch {length}"]:
    """The profile of heads of which only the three moments are known; `bias` is what positions add to the logits."""
    positions = torch.arange(1, check_length(length) + 1, dtype=torch.float64, device=spectrum.trace.device)
    shift = None if bias is None else bias.double() - bias.double().mean(-1, keepdim=True)
    return at(positions, spectrum, length=length, temperature=temperature, shift=shift)


def at(
    positions: Float[Tensor, " positions"],
    spectrum: Moments,
    *,
    length: int,
    temperature: float | None = None,
    shift: Float[Tensor, "*#batch positions"] | None = None,
) -> Float[Tensor, "*batch positions"]:
    """ρ_t = Φ((T−1−μ)/√v) − Φ((−1−μ)/√v), μ = Σc tr A/λ, v = [(Σc)² tr A² + T‖c‖²‖A‖²]/λ², at any real t.

    A bias b_t of the logits moves μ by `shift` = b_t − b̄ and leaves v alone.
    """
    total, squares = walk_weights(positions, length)
    scale = check_temperature(temperature, spectrum.d_head)
    mean = total * _column(spectrum.trace)
    mean = mean if shift is None else mean + scale * shift
    variance = total.square() * _column(spectrum.trace_of_square) + squares * _column(spectrum.frobenius_squared)
    return mass_between(-scale, (length - 1) * scale, mean=mean, variance=variance.expand_as(mean))


def limit(
    spectrum: Moments, theta: Float[Tensor, " positions"], *, temperature: float | None = None
) -> Float[Tensor, "*batch positions"]:
    """ρ(θ) for T → ∞ at θ = t/T in [0, 1]; 1 for A = 0, which is on the sloped piece at every finite T."""
    if bool(((theta < 0) | (theta > 1)).any()):
        raise refusal("positions θ from 0 to 1", theta.tolist(), "divide t by T")
    theta = theta.to(spectrum.trace.device, torch.float64)
    centred = theta - 0.5
    squares = theta.square() - theta + 1 / 3
    mean = centred * _column(spectrum.trace)
    variance = centred.square() * _column(spectrum.trace_of_square) + squares * _column(spectrum.frobenius_squared)
    scale = check_temperature(temperature, spectrum.d_head)
    silent = _column(spectrum.frobenius_squared) == 0
    return torch.where(silent, 1.0, mass_between(0.0, scale, mean=mean, variance=variance))


def mass_between(
    lower: float, upper: float, *, mean: Float[Tensor, "*shape"], variance: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """P(lower < N(mean, variance) < upper); a variance of zero (or below, by rounding) makes it 0 or 1.

    The temperature stays in the bounds and out of the moments: dividing by a tiny λ would give ∞/∞.
    """
    certain = variance <= 0
    deviation = variance.where(~certain, 1).sqrt()
    probability = torch.special.ndtr((upper - mean) / deviation) - torch.special.ndtr((lower - mean) / deviation)
    inside = ((mean > lower) & (mean < upper)).to(probability)
    return torch.where(certain, inside, probability).clamp(0, 1)


def _column(moment: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch 1"]:
    return moment.double()[..., None]
