"""Initialisations of queries and keys that choose the eigenspectrum of the start."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.errors import refusal, within
from locater.models.live.explicit import Explicit
from locater.models.live.watch import Sample
from locater.spectra import moments
from locater.stabilisers.base import Stabiliser, non_negative
from locater.stabilisers.live.find import find_pairs
from locater.stabilisers.live.pairs import Pair, check_stored
from locater.stabilisers.live.sharding import shard_of

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
    shard = shard_of(pair, pair.weights())
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


class MimeticInitialisation(Stabiliser):
    """Queries and keys whose product looks like a trained one's (Trockman & Kolter 2023, arXiv 2305.09828).

    W ≈ noise·Z + identity·I with Z ~ N(0, 1/d), cut to rank d_h by SVD; acts once, when made.

    With `values=[(value, output), …]` also output·value ≈ noise·Z − identity·I at the paper's 0.4. Keys of a group come
    from the mean of its heads' matrices, queries by least squares. Cost: one d×d SVD per key head.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        identity: float = 0.7,
        noise: float = 0.7,
        heads: Sequence[Explicit] = (),
        sample: Sample | None = None,
        values: Sequence[tuple[nn.Linear, nn.Linear]] = (),
        generator: torch.Generator | None = None,
    ) -> None:
        identity, noise = non_negative(identity, "identity"), non_negative(noise, "noise")
        pairs = find_pairs(model, heads=heads, sample=sample)
        check_stored(pairs, "initialise", FIRST)
        with torch.no_grad():
            for pair in pairs:
                shard = shard_of(pair, pair.weights())
                for query, key in zip(shard.query, shard.key[:, 0], strict=True):
                    wanted = noisy_identity(len(query), query.shape[-1], identity, noise, generator).to(query)
                    fresh = factors(wanted, query.shape[-2])
                    query.copy_(fresh[0])
                    key.copy_(fresh[1])
                shard.commit()
            for value, output in values:
                wanted = noisy_identity(1, value.in_features, -0.4, 0.4, generator).to(value.weight)
                inner, outer = factors(wanted, value.out_features)
                value.weight.copy_(inner[0])
                output.weight.copy_(outer.mT)


def noisy_identity(
    count: int, size: int, identity: float, noise: float, generator: torch.Generator | None = None
) -> Float[Tensor, "count size size"]:
    """noise·Z + identity·I, Z of variance 1/size."""
    normal = torch.randn(count, size, size, generator=generator) / size**0.5
    return noise * normal + identity * torch.eye(size)


def factors(
    wanted: Float[Tensor, "heads d_model d_model"], rank: int
) -> tuple[Float[Tensor, "heads rank d_model"], Float[Tensor, "rank d_model"]]:
    """Q_h and one K with K^T Q_h nearest to each wanted matrix, for the K of their mean's best rank-r factors."""
    left, values, _ = torch.linalg.svd(wanted.mean(0), full_matrices=False)
    root = values[:rank].sqrt()
    key = (left[:, :rank] * root).mT
    # K K^T is diag(root²), so the least-squares query is its inverse times K W.
    return (key @ wanted) / root[:, None].square(), key
