"""What every method for ρ_t starts from: checked arguments, weights that carry the covariance."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from ..spectra import Covariance, whiten


class Problem(NamedTuple):
    """Weights for standard normal steps, the length T and the temperature λ."""

    query: Float[Tensor, "*#batch d_head d_model"]
    key: Float[Tensor, "*#batch d_head d_model"]
    length: int
    temperature: float

    @property
    def batch(self) -> torch.Size:
        """The leading dimensions of the answer."""
        return torch.broadcast_shapes(self.query.shape[:-2], self.key.shape[:-2])

    def heads(self) -> list["Problem"]:
        """One problem per head, in the order of the flattened batch."""
        query = self.query.expand(*self.batch, -1, -1).reshape(-1, *self.query.shape[-2:])
        key = self.key.expand(*self.batch, -1, -1).reshape(-1, *self.key.shape[-2:])
        return [self._replace(query=one_query, key=one_key) for one_query, one_key in zip(query, key, strict=True)]


def prepare(query: Tensor, key: Tensor, *, length: int, temperature: float | None, covariance: Covariance) -> Problem:
    """Check the arguments of a profile and move the covariance into the weights."""
    length, temperature = check_length(length), check_temperature(temperature, query.shape[-2])
    query, key = whiten(query, key, covariance)
    if not (_all_finite(query) and _all_finite(key)):
        raise refusal("finite weights", "NaN or infinity", "check the weights and the covariance")
    return Problem(query, key, length, temperature)


def _all_finite(weights: Tensor) -> bool:
    """Whether no entry is NaN or infinite; the extremes tell, at a tenth of the cost of asking every entry."""
    return not weights.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(weights.detach()))).all())


def check_length(length: int) -> int:
    """T, a whole number of at least 1."""
    if length < 1:
        raise refusal("a length of at least 1", length)
    return int(length)


def check_temperature(temperature: float | None, d_head: int) -> float:
    """λ, by default √d_h."""
    if temperature is None:
        return math.sqrt(d_head)
    if not (math.isfinite(temperature) and temperature > 0):
        raise refusal("a temperature above 0", temperature)
    return float(temperature)


def walk_weights(positions: Float[Tensor, " positions"], length: int) -> tuple[Tensor, Tensor]:
    """Σ_s c_s and T‖c‖² of the weights c_s = 1[s ≤ t] − (T−s+1)/T, as polynomials of a real t."""
    after = length - positions
    total = positions - (length + 1) / 2
    before_squares = (positions - 1) * positions * (2 * positions - 1)
    after_squares = after * (after + 1) * (2 * after + 1)
    return total, (before_squares + after_squares) / (6 * length)
