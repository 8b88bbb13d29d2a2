"""The signal propagation probability ρ_t with the logit taken as Gaussian: good for large d_h, exact in its moments.

Of heads without positions from three moments, of rotary ones from forms in cosines and sines of the offset.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..budget import check_memory
from ..errors import refusal
from ..spectra import Covariance, Grams, Moments, RotaryForms, grams, moments, rotary_forms, rotation
from .random_walk import Turns, check_length, check_temperature, prepare, walk_weights

# Largest number of Gram entries taken at once; larger blocks leave the cache and are slower.
ENTRIES_AT_ONCE = 2**17


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


# ------------------------------------------------------------------------------------------------- rotary positions
def rotary_profile(
    query: Float[Tensor, "*#batch d_head d_model"],
    key: Float[Tensor, "*#batch d_head d_model"],
    *,
    length: int,
    turns: Turns,
    positions: Int[Tensor, " positions"] | None = None,
    temperature: float | None = None,
    covariance: Covariance = 1.0,
) -> Float[Tensor, "*batch positions"]:
    """ρ_t at the chosen positions t, by default 1 … T, with the logit taken as Gaussian.

    mean tr Σ_i C_i and variance T Σ_i ‖C_i‖² + tr (Σ_i C_i)², C_i = 1[i ≤ t] A_t − (1/T) Σ_{s≥i} A_s. Every C_i is a
    combination of cosines and sines, the same for all heads: O(T d_h²) once, then O(P d_h²) per head for P positions.
    """
    problem = prepare(query, key, length=length, temperature=temperature, covariance=covariance)
    products = grams(problem.query, problem.key)
    if positions is None:
        positions = torch.arange(1, length + 1, device=products.core.device)
    return Series(problem.length, positions, turns).profile(products, temperature=problem.temperature)


class Series:
    """Terms of z(Δ) in the profile, the same for all heads: a_t = z(T−t), and sums of b_i = (1/T) Σ_{s≥i} a_s."""

    def __init__(self, length: int, positions: Int[Tensor, " positions"], turns: Turns):
        if bool(((positions < 1) | (positions > length)).any()):
            raise refusal(f"positions from 1 to {length}", positions.tolist())
        check_memory(
            80 * length * len(turns.frequencies), f"the sums over {length:,} tokens"
        )  # five tables of cosines and sines
        offsets = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=positions.device)
        terms = rotation(offsets, turns.frequencies, amplitude=turns.amplitude)
        suffix = terms.flip(0).cumsum(0).flip(0) / length
        prefix = suffix.cumsum(0)
        self.length, self.pairs = length, turns.pairs
        self.count = positions.double()[:, None]
        self.here, self.until = terms[positions - 1], prefix[positions - 1]
        self.total = self.count * self.here - prefix[-1]
        self.squares = suffix.mT @ suffix

    def profile(self, products: Grams, *, temperature: float) -> Float[Tensor, "*batch positions"]:
        """ρ_t of every head: O(d_h²) for its forms, then O(P d_h²)."""
        parts = [self._probabilities(rotary_forms(part, self.pairs), temperature) for part in _split_heads(products)]
        return torch.cat(parts).reshape(*products.core.shape[:-2], len(self.count))

    def _probabilities(self, forms: RotaryForms, temperature: float) -> Float[Tensor, "heads positions"]:
        """P(−1 < ω_t − ω̄ < T−1) of some heads. Σ_i ‖C_i‖² = t a^T F a − 2 a^T F Σ_{i≤t} b_i + Σ_i b_i^T F b_i."""
        trace, square, norm = (form.double() for form in forms)  # the sums over the context cancel
        mean = trace @ self.total.mT
        norms = (self.here @ norm * (self.count * self.here - 2 * self.until)).sum(-1)
        norms = norms + (norm * self.squares).sum((-2, -1))[:, None]
        variance = self.length * norms + (self.total @ square * self.total).sum(-1)
        return mass_between(-temperature, (self.length - 1) * temperature, mean=mean, variance=variance)


def _split_heads(products: Grams) -> Iterator[Grams]:
    """Yield the products of some heads at a time."""
    batch, size = products.core.shape[:-2], products.core.shape[-1]
    flat = [product.expand(*batch, size, size).reshape(-1, size, size) for product in products]
    at_once = max(1, ENTRIES_AT_ONCE // size**2)
    for part in zip(*(product.split(at_once) for product in flat), strict=True):
        yield Grams(*part)
