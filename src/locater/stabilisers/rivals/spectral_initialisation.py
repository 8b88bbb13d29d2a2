"""An initialisation that gives every head a wanted ξ = tr W/η and η from the start (ours).

W_Q is turned from the direction of W_K into a random one until ξ is met; then both are scaled until η is.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import refusal, within
from ...models.live.explicit import Explicit
from ...spectra import moments
from ..base import Stabiliser
from ..live.pairs import Pair, find_pairs
from ..live.sharding import part_of


class SpectralInitialisation(Stabiliser):
    """tr W = ξη and the scale η (in units of λ) for every head; acts once, when made, on weights that are random.

    ξ reaches at most √d_h / √(1 + d_h/d) with Gaussian weights, where W_Q = W_K. Keys of a group stay shared: they
    keep their direction, and each query turns. Refuses a ξ out of reach.
    """

    def __init__(self, model: nn.Module, *, xi: float, eta: float, heads: Sequence[Explicit] = ()) -> None:
        if not 0 < eta < float("inf"):
            raise refusal("a positive, finite η", eta)
        for pair in find_pairs(model, heads=heads):
            with within(pair.name), torch.no_grad():
                _initialise(pair, xi, eta)


def _initialise(pair: Pair, xi: float, eta: float) -> None:
    part = part_of(pair, pair.weights())
    if part.across_columns is not None:
        raise refusal("heads with all of their columns", "sharded columns", "initialise before sharding")
    query, key = part.query.double(), part.key.double()
    turned = turn(query, key, xi)
    # One size for all keys of a group, the rest to each query: then the sizes of query and key are alike.
    size = (eta * pair.temperature / moments(turned, key).eta)[..., None, None]
    shared = size.mean(1, keepdim=True).sqrt()
    part.query.copy_(turned * size / shared)
    part.key.copy_(key * shared)
    part.commit()


def turn(
    query: Float[Tensor, "groups heads d_head d_model"], key: Float[Tensor, "groups 1 d_head d_model"], xi: float
) -> Float[Tensor, "groups heads d_head d_model"]:
    """cos φ · W_K ± sin φ · E with tr = ξη, E the part of the query orthogonal to the key, of the key's size.

    ξ falls from its largest at φ = 0 to 0 at φ = π/2; found by bisection to the last bit. Cost: the d_h×d_h products
    at each of sixty steps.
    """
    length = key.square().sum((-2, -1), keepdim=True)
    other = query - (query * key).sum((-2, -1), keepdim=True) / length * key
    other = other * (length / other.square().sum((-2, -1), keepdim=True)).sqrt()
    along = key.expand_as(other) * (1 if xi >= 0 else -1)
    largest = float(moments(along, key).xi.abs().min())
    if not abs(xi) < largest:
        raise refusal(f"|ξ| below {largest:.3g}, which query = key would give", xi, "take a smaller ξ or wider heads")
    low, high = torch.zeros_like(query[..., :1, :1]), torch.full_like(query[..., :1, :1], torch.pi / 2)
    for _ in range(60):
        angle = (low + high) / 2
        reached = moments(angle.cos() * along + angle.sin() * other, key).xi.abs()[..., None, None] > abs(xi)
        low, high = angle.where(reached, low), high.where(reached, angle)
    return angle.cos() * along + angle.sin() * other
