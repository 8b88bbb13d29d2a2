"""κ·scale + mean penalty of one pair of query and key weights, with its gradient in closed form.

The graph keeps three d_h×d_h matrices per head and the parameters themselves, nothing of the weights' size.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..spectra import Grams
from .gradients import gram_matrices, pull_back
from .live.pairs import Pair
from .live.sharding import Part, part_of
from .scales import Functional, Setting, add_to_diagonal, trace


class Terms(NamedTuple):
    """strength·scale(W) + mean_weight·((tr W − target)/λ)², summed over heads.

    `gain` multiplies the columns of query and key before anything else (the gain of the norm that feeds them).
    """

    scale: Functional
    strength: float
    mean_weight: float = 0.0
    targets: Float[Tensor, "groups heads"] | None = None  # of tr W, not divided by λ
    gain: Float[Tensor, " d_model"] | None = None

    def fold(self, part: Part) -> tuple[Tensor, Tensor]:
        if self.gain is None:
            return part.query, part.key
        gain = self.gain[part.columns].to(part.query)
        return part.query * gain, part.key * gain

    def values(self, grams: Grams, part: Part) -> Float[Tensor, "groups heads"]:
        values = self.strength * self.scale.value(grams, setting_of(part.pair))
        if not self.mean_weight:
            return values
        return values + self.mean_weight * (self._excess(grams, part) / part.pair.temperature).square()

    def slope(self, grams: Grams, part: Part) -> Grams:
        slope = self.scale.slope(grams, setting_of(part.pair))
        slope = Grams(*(self.strength * matrix for matrix in slope))
        if not self.mean_weight:
            return slope
        numbers = 2 * self.mean_weight / part.pair.temperature**2 * self._excess(grams, part)
        return slope._replace(core=add_to_diagonal(slope.core, numbers))

    def _excess(self, grams: Grams, part: Part) -> Float[Tensor, "groups heads"]:
        assert self.targets is not None
        return trace(grams.core) - self.targets[part.groups].to(grams.core)


def setting_of(pair: Pair) -> Setting:
    return Setting(pair.d_model, pair.rotary)


class Energy(torch.autograd.Function):
    """The sum over one pair's heads. Backward: ∇_Q and ∇_K from the slopes, four d_h×d_h×d products per head."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, terms: Terms, *weights: Tensor) -> Tensor:
        with torch.autocast(weights[0].device.type, enabled=False):
            part = part_of(pair, weights)
            grams = part.complete(gram_matrices(*terms.fold(part)))
            slope = terms.slope(grams, part)
            ctx.pair, ctx.terms = pair, terms
            ctx.save_for_backward(*weights, *slope)
            return part.total(terms.values(grams, part))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_value: Tensor) -> tuple[Tensor | None, ...]:
        *weights, core, query, key = ctx.saved_tensors
        with torch.autocast(core.device.type, enabled=False):
            part = part_of(ctx.pair, weights)
            slope = Grams(*(by_value[0].to(core) * matrix for matrix in (core, query, key)))
            return None, None, *gradient(part, slope, ctx.terms)


def gradient(part: Part, slope: Grams, terms: Terms) -> tuple[Tensor, ...]:
    """The gradient by each weight, placed as the weight is."""
    return part.scatter(*head_gradients(part, slope, terms))


def head_gradients(part: Part, slope: Grams, terms: Terms) -> tuple[Tensor, Tensor]:
    """The gradient by query and key heads at hand; a gain multiplies the columns once more."""
    by_query, by_key = pull_back(slope, *terms.fold(part))
    if terms.gain is not None:
        gain = terms.gain[part.columns].to(by_query)
        by_query, by_key = by_query * gain, by_key * gain
    return by_query, by_key


def energy(pair: Pair, terms: Terms) -> Float[Tensor, ""]:
    """The pair's energy as a scalar of the autograd graph."""
    weights = pair.weights()
    if torch.compiler.is_compiling():
        return _traced(pair, terms, weights)
    return Energy.apply(pair, terms, *weights)


def _traced(pair: Pair, terms: Terms, weights: tuple[Tensor, ...]) -> Float[Tensor, ""]:
    """The same by autograd, for a compiler that derives and fuses by itself; plain tensors only."""
    with torch.autocast(weights[0].device.type, enabled=False):
        wide = [weight if weight.dtype == torch.float64 else weight.float() for weight in weights]
        part = Part(
            pair, weights, pair.query.view(wide[0]), pair.key.view(wide[-1]), tuple(wide), (pair.query, pair.key)
        )
        return terms.values(gram_matrices(*terms.fold(part)), part).sum()
