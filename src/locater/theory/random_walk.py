"""The token model of the theory: checked arguments, weights that carry the covariance, logits of simulated walks."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
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


class Turns(NamedTuple):
    """Rotary positions of one head: the pairs of rows that turn, by which angle per token, and their amplitude."""

    pairs: Int[Tensor, "pairs 2"]
    frequencies: Float[Tensor, " pairs"]
    amplitude: float = 1.0


def prepare(query: Tensor, key: Tensor, *, length: int, temperature: float | None, covariance: Covariance) -> Problem:
    """Check the arguments of a profile and move the covariance into the weights."""
    length, temperature = check_length(length), check_temperature(temperature, query.shape[-2])
    query, key = whiten(query, key, covariance)
    if not (_all_finite(query) and _all_finite(key)):
        raise refusal("finite weights", "NaN or infinity", "check the weights and the covariance")
    return Problem(query, key, length, temperature)


def _all_finite(weights: Tensor) -> bool:
    """Tell whether no entry is NaN or infinite; the extremes tell, at a tenth of the cost of asking every entry."""
    return not weights.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(weights.detach()))).all())


LONGEST = 2**31  # more than any text, and what indices can count


def check_length(length: int) -> int:
    """T, a whole number from 1 to LONGEST."""
    if length < 1:
        raise refusal("a length of at least 1", length)
    if length > LONGEST:
        raise refusal(f"a length of at most {LONGEST:,}", length)
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


# Largest number of normal variates held at once.
VARIATES_AT_ONCE = 2**22


class Estimate(NamedTuple):
    """A mean over random walks and its standard error."""

    mean: Float[Tensor, "*shape"]
    standard_error: Float[Tensor, "*shape"]


def logits(
    head: Problem, turns: Turns | None = None, *, num_walks: int, generator: torch.Generator
) -> Iterator[Float[Tensor, "walks {head.length}"]]:
    """λ·ω_t = x_t^T W x_T of independent walks, some walks at a time, num_walks in all; `turns` turn queries and keys.

    Without them the tokens x_t are never stored: the increments of the logit are ε_s·(W x_T), so the steps suffice.
    Refuses weights whose logits overflow.
    """
    query, key = _reduced(head.query, head.key)
    for steps in _normal_steps(num_walks, (head.length, query.shape[-1]), like=query, generator=generator):
        if turns is None:
            direction = steps.sum(1) @ query.mT @ key
            values = (steps @ direction[..., None])[..., 0].cumsum(-1)
        else:
            tokens = steps.cumsum(1)
            keys, last = _turned(tokens @ key.mT, turns), _turned(tokens[:, -1:] @ query.mT, turns, first=head.length)
            values = (keys @ last.mT)[..., 0]
        if not bool(torch.isfinite(values).all()):
            raise refusal("weights whose logits are finite", "an overflow", "scale the weights down or use float64")
        yield values


def _turned(vectors: Float[Tensor, "walks length d_head"], turns: Turns, first: int = 1) -> Tensor:
    """Turn the vectors of positions `first` … one by one, in place."""
    angles = torch.arange(first, first + vectors.shape[1])[:, None] * turns.frequencies.double().cpu()
    phases = torch.polar(torch.full_like(angles, turns.amplitude), angles).to(vectors.device)
    real, imaginary = turns.pairs.to(vectors.device).unbind(-1)
    turned = torch.complex(vectors[..., real].double(), vectors[..., imaginary].double()) * phases
    vectors[..., real], vectors[..., imaginary] = turned.real.to(vectors), turned.imag.to(vectors)
    return vectors


def _normal_steps(
    num_walks: int, shape: tuple[int, int], *, like: Tensor, generator: torch.Generator
) -> Iterator[Float[Tensor, "walks length d_model"]]:
    """Standard normal steps in blocks of bounded memory."""
    if num_walks < 1:
        raise refusal("at least one walk", num_walks)
    at_once = max(1, VARIATES_AT_ONCE // (shape[0] * shape[1]))
    for start in range(0, num_walks, at_once):
        walks = min(at_once, num_walks - start)
        yield torch.randn(walks, *shape, generator=generator, dtype=like.dtype, device=like.device)


def _reduced(
    query: Float[Tensor, "d_head d_model"], key: Float[Tensor, "d_head d_model"]
) -> tuple[Float[Tensor, "d_head span"], Float[Tensor, "d_head span"]]:
    """The weights in an orthonormal basis of all their rows: standard normal steps stay standard normal there."""
    if query.shape[-1] <= 2 * query.shape[-2]:
        return query, key
    basis = torch.linalg.qr(torch.cat([query, key]).mT).Q
    return query @ basis, key @ basis
