"""The scale of a head as an object: a number made from its Gram matrices, and the slope of that number.

With M = W_K W_Q^T, G_Q = W_Q W_Q^T, G_K = W_K W_K^T everything here is of size d_h×d_h.
"""

import warnings
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from ..positions import Rotary
from ..spectra import Grams, rotary_forms, rotation


class Setting(NamedTuple):
    """What a functional may need to know of the heads beside their Gram matrices."""

    d_model: int
    rotary: Rotary | None = None


@runtime_checkable
class Functional(Protocol):
    """value(grams) per head, and its slope: the derivative by each of the three Gram matrices."""

    def value(self, grams: Grams, setting: Setting) -> Float[Tensor, "*heads"]: ...
    def slope(self, grams: Grams, setting: Setting) -> Grams: ...


def trace(core: Float[Tensor, "*batch d_head d_head"]) -> Float[Tensor, "*batch"]:
    """tr M, which is tr W."""
    return core.diagonal(dim1=-2, dim2=-1).sum(-1)


def inner(left: Float[Tensor, "*#batch n n"], right: Float[Tensor, "*#batch n n"]) -> Float[Tensor, "*batch"]:
    """Σ L∘R."""
    return (left * right).sum((-2, -1))


@dataclass(frozen=True)
class Quadratic:
    """a·tr W² + b·‖W‖² + c·(tr W)², with a, b, c that may depend on d.

    Slopes: 2a M^T + 2c tr(M) I by M, b G_K by G_Q, b G_Q by G_K. Bounded below if b ≥ |a| and c ≥ 0.
    """

    def weights(self, d_model: int) -> tuple[float, float, float]:
        raise NotImplementedError

    def value(self, grams: Grams, setting: Setting) -> Float[Tensor, "*heads"]:
        square, norm, mean = self.weights(setting.d_model)
        value = norm * inner(grams.query, grams.key) + mean * trace(grams.core).square()
        return value + square * inner(grams.core, grams.core.mT) if square else value

    def slope(self, grams: Grams, setting: Setting) -> Grams:
        square, norm, mean = self.weights(setting.d_model)
        by_core = 2 * square * grams.core.mT
        if mean:
            by_core = add_to_diagonal(by_core, 2 * mean * trace(grams.core))
        return Grams(by_core, norm * grams.key, norm * grams.query)


class Eta(Quadratic):
    """η² = (tr W² + 2‖W‖²)/3: the scale that the variance of the signal contains; at least ‖W‖²/3."""

    def weights(self, d_model: int) -> tuple[float, float, float]:
        return 1 / 3, 2 / 3, 0.0


class Frobenius(Quadratic):
    """‖W‖_F², the sum of the squared singular values of W."""

    def weights(self, d_model: int) -> tuple[float, float, float]:
        return 0.0, 1.0, 0.0


class Variance(Quadratic):
    """η²(W − mI)/d = (η² − (tr W)²/d)/d with m = tr W/d: never negative, the eigenvalues' variance for symmetric W."""

    def weights(self, d_model: int) -> tuple[float, float, float]:
        return 1 / (3 * d_model), 2 / (3 * d_model), -1 / d_model**2


@dataclass(frozen=True)
class TraceOfSquare(Quadratic):
    """tr W², the paper's literal form, for study: unbounded below unless W is symmetric, so descent diverges."""

    def __post_init__(self):
        message = "tr W² is unbounded below when W is not symmetric, so training may diverge; Eta() is the safe form"
        warnings.warn(message, stacklevel=3)

    def weights(self, d_model: int) -> tuple[float, float, float]:
        return 1.0, 0.0, 0.0


@dataclass(frozen=True)
class OverOffsets:
    """The mean of a quadratic functional of W(Δ) = W_K^T R_Δ W_Q over the offsets Δ = 0 … length − 1.

    Each moment is a quadratic form in z(Δ), so only the mean of z z^T is needed, however long the text. Heads
    without rotary positions get the functional itself. Slopes by autograd on the d_h×d_h matrices.
    """

    scale: Quadratic
    length: int = 1024

    def __post_init__(self):
        if self.length < 1:
            raise refusal("a length of at least 1", self.length)

    def value(self, grams: Grams, setting: Setting) -> Float[Tensor, "*heads"]:
        if setting.rotary is None:
            return self.scale.value(grams, setting)
        square, norm, mean = self.scale.weights(setting.d_model)
        forms = rotary_forms(grams, setting.rotary.pairs)
        second = self._second_moment(setting.rotary).to(grams.core)
        averaged = (forms.trace @ second * forms.trace).sum(-1)
        return square * inner(forms.square, second) + norm * inner(forms.norm, second) + mean * averaged

    def slope(self, grams: Grams, setting: Setting) -> Grams:
        if setting.rotary is None:
            return self.scale.slope(grams, setting)
        leaves = Grams(*(gram.detach().requires_grad_() for gram in grams))
        with torch.enable_grad():
            # A key of a group stands in the value of each of its heads, so the sum is what has this slope.
            total = self.value(leaves, setting).sum()
        by_core, by_query, by_key = torch.autograd.grad(total, leaves, materialize_grads=True)
        return Grams(by_core, (by_query + by_query.mT) / 2, (by_key + by_key.mT) / 2)

    def _second_moment(self, rotary: Rotary) -> Float[Tensor, "terms terms"]:
        """Mean of z(Δ) z(Δ)^T."""
        offsets = torch.arange(self.length, dtype=torch.float64)
        terms = rotation(offsets, rotary.frequencies(self.length), amplitude=rotary.amplitude)
        return terms.mT @ terms / self.length


def add_to_diagonal(
    matrix: Float[Tensor, "*batch n n"], numbers: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch n n"]:
    """A + diag(x): the identity times one number for each matrix."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return matrix + numbers[..., None, None] * identity
