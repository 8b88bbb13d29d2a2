"""The decoupled step: weights moved against the energy's gradient, in place and without a graph."""

import torch
from jaxtyping import Bool
from torch import Tensor

from .base import learning_rate
from .energy import Terms, gradient, head_gradients
from .gradients import gram_matrices
from .live.pairs import Pair
from .live.sharding import part_of
from .scales import trace


def shrink(pair: Pair, terms: Terms, rates: dict[int, float]) -> Bool[Tensor, ""]:
    """W −= lr·∇, with the learning rate of the parameter's own group. Cost: seven d_h×d_h×d products per head.

    Weights that are computed from parameters (LoRA, parametrisations) hand the gradient on to these. Says whether all
    was finite, as a tensor, so that a GPU need not be waited for at each layer.
    """
    with torch.enable_grad():
        weights = pair.weights()
    part = part_of(pair, weights)
    grams = part.complete(gram_matrices(*terms.fold(part)))
    finite = torch.isfinite(trace(grams.query).sum() + trace(grams.key).sum())
    slope = terms.slope(grams, part)
    if not pair.is_stored:
        _hand_on(pair, weights, gradient(part, slope, terms), rates)
        return finite
    by_query, by_key = head_gradients(part, slope, terms)
    for heads, by_heads, grid, weight in zip(
        (part.query, part.key), (by_query, by_key), (pair.query, pair.key), (weights[0], weights[-1]), strict=True
    ):
        if weight.requires_grad:
            heads.sub_(by_heads, alpha=learning_rate(rates, weight, grid.place.name))
    part.commit()
    return finite


def _hand_on(pair: Pair, weights: tuple[Tensor, ...], gradients: tuple[Tensor, ...], rates: dict[int, float]) -> None:
    """Through the graph that made the weights, which is as small as they are."""
    parameters = {
        id(parameter): (name, parameter)
        for grid in (pair.query, pair.key)
        for name, parameter in (grid.place.adapted or grid.place.module).named_parameters()
        if parameter.requires_grad
    }
    leaves = [parameter for _, parameter in parameters.values()]
    moved = [(weight, by) for weight, by in zip(weights, gradients, strict=True) if weight.requires_grad]
    found = torch.autograd.grad([weight for weight, _ in moved], leaves, [by for _, by in moved], allow_unused=True)
    for (name, parameter), by in zip(parameters.values(), found, strict=True):
        if by is not None:
            parameter.sub_(by, alpha=learning_rate(rates, parameter, name))
