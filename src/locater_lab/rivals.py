"""Arms of studies under the interface of stabilisers; what practitioners use is in `locater.stabilisers`.

AlphaDecay (more weight decay for weights whose spectrum has a lighter tail, He et al. 2025, arXiv 2506.14562), spectral
normalisation of queries and keys, and two initialisations.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from locater.errors import refusal, within
from locater.models.live.explicit import Explicit
from locater.models.live.masters import current, write_master
from locater.models.live.rate_factor import Rates
from locater.models.live.watch import Sample
from locater.models.live.write_check import WriteCheck
from locater.projections import whole, widen
from locater.records import State
from locater.spectra import moments
from locater.stabilisers.base import Stabiliser, non_negative
from locater.stabilisers.live.find import find_pairs
from locater.stabilisers.live.pairs import Pair, check_stored
from locater.stabilisers.live.sharding import check_not_spread
from locater.stabilisers.live.weights import Rows
from locater.stabilisers.reparametrisation import SpectralScale, linear_weights, remove

__all__ = ["AlphaDecay", "MimeticInitialisation", "SpectralInitialisation", "SpectralNorm"]

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
                shard = pair.shard()
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


LIGHTEST = 1e3  # α of a spectrum without any tail, where Hill's estimate has no bound


class AlphaDecay(Stabiliser):
    """W −= lr·decay·s·W after the optimiser's step, s linear in α from `lowest` to `highest` over all linear weights.

    α is the tail index of the squared singular values (`tail_index`), measured anew after every `every` steps;
    embeddings, and an output layer tied to them, are left alone. Give the optimiser itself no weight decay for these
    weights. Cost: the eigenvalues of all W W^T once in `every` steps; under FSDP2 each weight is gathered for that.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer,
        decay: float = 0.1,
        lowest: float = 2 / 3,
        highest: float = 5.0,
        every: int = 500,
    ) -> None:
        if every < 1:
            raise refusal("a measurement at most once in a step", every, "give every=1 or more")
        self.decay, self.optimizer, self.every = non_negative(decay, "decay"), optimizer, every
        self.lowest, self.highest = non_negative(lowest, "lowest share"), non_negative(highest, "highest share")
        names = {id(module): name for name, module in model.named_modules()}
        found = [(f"{names[id(module)]}.{name}", module, name) for module, name in linear_weights(model)]
        self.places = [place for place in found if getattr(place[1], place[2]).requires_grad]
        if not self.places:
            raise refusal("a model with linear layers that are trained", type(model).__name__)
        remedy = "give the decay to the optimiser"
        self.writes = WriteCheck((getattr(module, name) for _, module, name in self.places), optimizer, remedy)
        rates = Rates(optimizer)
        for name, module, attribute in self.places:
            rates.learning_rate(getattr(module, attribute), name)
        self.steps = 0
        self.alphas = torch.zeros(len(self.places), dtype=torch.float64)
        self._measure()

    @torch.no_grad()
    def step(self) -> None:
        self.writes.check()
        if self.steps and self.steps % self.every == 0:
            self._measure()
        self.steps += 1
        rates = Rates(self.optimizer)
        for (name, module, attribute), share in zip(self.places, self.shares(), strict=True):
            weight = getattr(module, attribute)
            write_master(weight, current(weight).mul_(1 - rates.learning_rate(weight, name) * self.decay * share))

    def shares(self) -> list[float]:
        """Factors of the decay of each weight; the middle of both ends where all tails are alike."""
        low, high = self.alphas.min(), self.alphas.max()
        place = (self.alphas - low) / (high - low) if high > low else torch.full_like(self.alphas, 0.5)
        return (self.lowest + (self.highest - self.lowest) * place).tolist()

    @torch.no_grad()
    def _measure(self) -> None:
        weights = [getattr(module, attribute) for _, module, attribute in self.places]
        self.alphas = torch.tensor([tail_index(whole(weight.detach())) for weight in weights], dtype=torch.float64)

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        spread = {"min": self.alphas.min(), "mean": self.alphas.mean(), "max": self.alphas.max()}
        return {f"alpha_decay/{name}": float(value) for name, value in spread.items()}

    def state_dict(self) -> State:
        return {"steps": self.steps, "alphas": self.alphas.clone()}

    def load_state_dict(self, state: State) -> None:
        """Refuses the state of a model with other layers."""
        if state["alphas"].shape != self.alphas.shape:
            raise refusal(f"the state of {len(self.alphas)} linear weights", len(state["alphas"]))
        self.steps, self.alphas = int(state["steps"]), state["alphas"].to(self.alphas).clone()


def tail_index(weight: Float[Tensor, "rows columns"]) -> float:
    """α = 1 + k/Σ log(λ_i/λ_k) over the larger half of the eigenvalues λ of W W^T: Hill's estimate, smaller if heavier.

    >>> round(tail_index(torch.diag(torch.tensor([1.0, 1.0, 1.0, torch.e]))), 4)  # λ: 1, 1, 1, e²
    2.0
    """
    matrix = widen(weight)
    narrow = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    values = torch.linalg.eigvalsh((narrow @ narrow.mT).double())
    tail = values[len(values) // 2 :].clamp_min(torch.finfo(values.dtype).tiny).log()
    excess = float((tail - tail[0]).sum())
    return 1 + len(tail) / max(excess, len(tail) / LIGHTEST)
