"""Arms of studies under the interface of stabilisers; what practitioners use is in `locater.stabilisers`.

Spectral normalisation of queries and keys, and an initialisation.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from locater.errors import refusal, within
from locater.models.live.modules import Explicit
from locater.models.live.watch import Sample
from locater.spectra import moments
from locater.stabilisers.base import Stabiliser
from locater.stabilisers.live.find import find_pairs
from locater.stabilisers.live.pairs import Pair, check_stored
from locater.stabilisers.live.sharding import check_not_spread
from locater.stabilisers.live.weights import Rows
from locater.stabilisers.reparametrisation import SpectralScale, remove

__all__ = ["SpectralInitialisation", "SpectralNorm"]

FIRST = "do it before an adapter or a parametrisation is attached"


class SpectralInitialisation(Stabiliser):
    """tr W = ξη and the scale η (in units of λ) for every head (ours); acts once, when made, on random weights.

    W_Q is turned from the direction of W_K into a random one until ξ is met; then both are scaled until η is. ξ reaches
    at most √d_h / √(1 + d_h/d) with Gaussian weights, where W_Q = W_K. Keys of a group stay shared: they keep their
    direction, and each query turns. Refuses a ξ out of reach.
    """

    def __init__(
        self, model: nn.Module, *, xi: float, eta: float, heads: Sequence[Explicit] = (), sample: Sample | None = None
    ) -> None:
        if not 0 < eta < float("inf"):
            raise refusal("a positive, finite η", eta)
        pairs = find_pairs(model, heads=heads, sample=sample)
        check_stored(pairs, "initialise", FIRST)
        for pair in pairs:
            with within(pair.name), torch.no_grad():
                _initialise(pair, xi, eta)


def _initialise(pair: Pair, xi: float, eta: float) -> None:
    shard = pair.shard()
    if shard.across_columns is not None:
        raise refusal("heads with all of their columns", "sharded columns", "initialise before sharding")
    query, key = shard.query.double(), shard.key.double()
    turned = turn(query, key, xi)
    # One size for all keys of a group, the rest to each query: then the sizes of query and key are alike.
    size = (eta * pair.temperature / moments(turned, key).eta)[..., None, None]
    shared = size.mean(1, keepdim=True).sqrt()
    shard.query.copy_(turned * size / shared)
    shard.key.copy_(key * shared)
    shard.commit()


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
    angle = low
    for _ in range(60):
        angle = (low + high) / 2
        reached = moments(angle.cos() * along + angle.sin() * other, key).xi.abs()[..., None, None] > abs(xi)
        low, high = angle.where(reached, low), high.where(reached, angle)
    return angle.cos() * along + angle.sin() * other


class SpectralNorm(Stabiliser):
    """W ↦ W/σ(W) (Miyato et al. 2018, arXiv 1802.05957) on queries and keys.

    The queries of all heads of a layer, and the keys, each with spectral norm one; values are not touched.

    `detach()` gives the raw weights back; `detach(bake=True)` leaves the normalised ones.
    """

    def __init__(self, model: nn.Module, *, heads: Sequence[Explicit] = (), sample: Sample | None = None) -> None:
        check_not_spread(model)
        blocks: dict[tuple[int, str], list[Rows]] = {}
        for pair in find_pairs(model, heads=heads, sample=sample, trained=False):
            for rows in (pair.query, pair.key):
                blocks.setdefault((id(rows.weight.module), rows.weight.attribute), []).append(rows)
        weights = [rows[0].weight for rows in blocks.values()]
        self.places = [(weight.module, weight.attribute) for weight in weights]
        for (module, attribute), several in zip(self.places, blocks.values(), strict=True):
            indices = [rows.places.flatten() for rows in several]
            scale = SpectralScale(getattr(module, attribute), blocks=indices, axis=several[0].row_axis, gain=None)
            parametrize.register_parametrization(module, attribute, scale)

    def detach(self, *, bake: bool = False) -> None:
        for module, attribute in self.places:
            remove(module, attribute, bake=bake)
