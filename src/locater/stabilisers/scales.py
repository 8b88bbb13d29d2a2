"""The scale of a head as an object: a number made from its Gram matrices, and the slope of that number by each of them.

With M = W_K W_Q^T, G_Q = W_Q W_Q^T, G_K = W_K W_K^T everything here is of size d_h×d_h.
"""

import warnings
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ..spectra import ETA_WEIGHTS, Grams


class Scale:
    """Scale that LocAteR shrinks. A custom one only needs `value`; its slope comes by autograd on d_h×d_h matrices.

    Called in training, so no checks and no `item()`: heads are a batch, and a GPU must not be waited for.
    """

    def value(self, grams: Grams, *, d_model: int) -> Float[Tensor, "*heads"]:
        """One number for each head."""
        raise NotImplementedError

    def slope(self, grams: Grams, *, d_model: int) -> Grams:
        """The derivative of the sum over heads by M, G_Q and G_K; the last two symmetric."""
        leaves = Grams(*(gram.detach().requires_grad_() for gram in grams))
        with torch.enable_grad():
            # A key of a group stands in the value of each of its heads, so the sum is what has this slope.
            total = self.value(leaves, d_model=d_model).sum()
        by_core, by_query, by_key = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return Grams(by_core, (by_query + by_query.mT) / 2, (by_key + by_key.mT) / 2)

    def on(self, groups: slice) -> "Scale":
        """The same for some groups of the heads only: those that one rank holds."""
        return self


class Quadratic(Scale):
    """a·tr W² + b·‖W‖² + c·(tr W)², with a, b, c that may depend on d.

    Slopes: 2a M^T + 2c tr(M) I by M, b G_K by G_Q, b G_Q by G_K. Bounded below if b ≥ |a| and c ≥ 0.
    """

    def weights(self, d_model: int) -> tuple[float, float, float]:
        """a, b and c."""
        raise NotImplementedError

    def value(self, grams: Grams, *, d_model: int) -> Float[Tensor, "*heads"]:
        square, norm, mean = self.weights(d_model)
        value = norm * grams.frobenius_squared
        value = value + mean * grams.trace.square() if mean else value
        return value + square * grams.trace_of_square if square else value

    def slope(self, grams: Grams, *, d_model: int) -> Grams:
        square, norm, mean = self.weights(d_model)
        by_core = 2 * square * grams.core.mT
        if mean:
            by_core = add_to_diagonal(by_core, 2 * mean * grams.trace)
        return Grams(by_core, norm * grams.key, norm * grams.query)


class Eta(Quadratic):
    """η² = (tr W² + 2‖W‖²)/3: the scale that the variance of the signal contains; at least ‖W‖²/3."""

    def weights(self, d_model: int) -> tuple[float, float, float]:
        square, norm = ETA_WEIGHTS
        return square / (square + norm), norm / (square + norm), 0.0


class Frobenius(Quadratic):
    """‖W‖_F², the sum of the squared singular values of W."""

    def weights(self, d_model: int) -> tuple[float, float, float]:
        return 0.0, 1.0, 0.0


class Variance(Quadratic):
    """η²(W − mI)/d = (η² − (tr W)²/d)/d with m = tr W/d: never negative, the eigenvalues' variance for symmetric W."""

    def weights(self, d_model: int) -> tuple[float, float, float]:
        square, norm, _ = Eta().weights(d_model)
        return square / d_model, norm / d_model, -1 / d_model**2


class TraceOfSquare(Quadratic):
    """tr W², the paper's literal form, for study: unbounded below unless W is symmetric, so descent diverges."""

    def __init__(self) -> None:
        message = "tr W² is unbounded below when W is not symmetric, so training may diverge; Eta() is the safe form"
        warnings.warn(message, stacklevel=2)

    def weights(self, d_model: int) -> tuple[float, float, float]:
        return 1.0, 0.0, 0.0


@dataclass(frozen=True, eq=False)
class TraceNear(Scale):
    """weight · (tr W − target)²: what a penalised mean adds."""

    weight: float
    target: Float[Tensor, "*heads"]

    def value(self, grams: Grams, *, d_model: int) -> Float[Tensor, "*heads"]:
        return self.weight * self._excess(grams).square()

    def slope(self, grams: Grams, *, d_model: int) -> Grams:
        core = add_to_diagonal(torch.zeros_like(grams.core), 2 * self.weight * self._excess(grams))
        return Grams(core, torch.zeros_like(grams.query), torch.zeros_like(grams.key))

    def on(self, groups: slice) -> Scale:
        return replace(self, target=self.target[groups])

    def _excess(self, grams: Grams) -> Float[Tensor, "*heads"]:
        return grams.trace - self.target.to(grams.core)


@dataclass(frozen=True, eq=False)
class Objective(Scale):
    """strength · scale, and what the mean adds to it."""

    scale: Scale
    strength: float
    mean: Scale | None = None

    def value(self, grams: Grams, *, d_model: int) -> Float[Tensor, "*heads"]:
        value = self.strength * self.scale.value(grams, d_model=d_model)
        return value if self.mean is None else value + self.mean.value(grams, d_model=d_model)

    def slope(self, grams: Grams, *, d_model: int) -> Grams:
        slope = self.scale.slope(grams, d_model=d_model)
        slope = Grams(*(self.strength * part for part in slope))
        if self.mean is None:
            return slope
        # A zero of the mean's may stand for all heads of a group at once, where the scale's slope has one for each.
        return Grams(*map(torch.add, slope, self.mean.slope(grams, d_model=d_model)))

    def on(self, groups: slice) -> Scale:
        return replace(self, scale=self.scale.on(groups), mean=self.mean and self.mean.on(groups))


def add_to_diagonal(
    matrix: Float[Tensor, "*batch n n"], numbers: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch n n"]:
    """A + diag(x): the identity times one number for each matrix."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix + numbers[..., None, None] * identity
