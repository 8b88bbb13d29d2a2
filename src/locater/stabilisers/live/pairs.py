"""`Pair`: the queries and keys of one attention module, as a batch of heads that is read from the live weights.

Heads are rows of a matrix, stored or computed (LoRA): `penalty.py` on the local shards of it. The graph keeps three
d_h×d_h matrices per head and the parameters themselves, nothing of the weights' size. In latent attention (DeepSeek,
Kimi) weights of heads are products of parameters, W_K,h = U_h A, U_h of size d_h×(rank + rope): the up projection times
the inner norm's gain, and ones for the rows that all heads share. Every Gram product goes through A A^T of size
rank×rank; no head's d_h×d weight is made.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...errors import refusal
from ...head import Block
from ...models.live.masters import current, write_master
from ...models.live.rate_factor import Rates
from ...projections import whole, widen
from ...spectra import Grams, Moments, gram_products, moments_of
from ..penalty import penalty, pull_back
from ..scales import Scale
from .sharding import HeadShard, shard_of
from .weights import LiveWeight, Rows

PerHead = Float[Tensor, "groups heads"]
TINY = 1e-12  # where neither the loss nor the penalty has a gradient there is nothing to divide


@dataclass(frozen=True)
class Inner:
    """Input of an up projection: the down projection, and the gain of the norm between them."""

    down: LiveWeight
    gain: LiveWeight | None
    rank: int

    def parts(self) -> list[LiveWeight]:
        return [self.down] if self.gain is None else [self.down, self.gain]


@dataclass(frozen=True)
class Pair:
    """Query heads (groups, heads, d_h, d) and their keys (groups, 1, d_h, d); `first` is the first head's index.

    In latent attention `query` and `key` are the rows of the up projections, the key's without the rope rows, which are
    the down projection's last; `query_inner` is None where queries are projected directly.
    """

    block: Block
    layer: int
    first: int
    query: Rows
    key: Rows
    temperature: float
    d_model: int
    key_inner: Inner | None = None
    query_inner: Inner | None = None

    @property
    def sides(self) -> tuple[Rows, Rows]:
        return self.query, self.key

    @property
    def is_fused(self) -> bool:
        return self.query.weight.identity == self.key.weight.identity

    @property
    def is_stored(self) -> bool:
        """True if the weights of heads are rows of parameters themselves."""
        return self.key_inner is None and all(rows.weight.is_stored for rows in self.sides)

    @property
    def shape(self) -> tuple[int, int]:
        """Groups, and query heads in each."""
        return self.query.num_groups, self.query.num_heads

    @property
    def name(self) -> str:
        return f"{self.block} layer {self.layer} ({self.query.weight.name})"

    def weights(self) -> tuple[Tensor, ...]:
        """The tensors that hold the rows, once each: one if fused, else two."""
        query = self.query.weight.read()
        return (query,) if self.is_fused else (query, self.key.weight.read())

    def shard(self, weights: Sequence[Tensor] | None = None, *, exact: bool = False) -> HeadShard:
        """The local part of these weights, the pair's own if None; `exact` for what writes."""
        weights = self.weights() if weights is None else weights
        return shard_of(self.sides, weights, name=self.name, d_model=self.d_model, exact=exact)

    def leaves(self) -> dict[str, nn.Parameter]:
        """The trained parameters that the heads are, or are computed from, once each, by name."""
        inner = [one for one in (self.key_inner, self.query_inner) if one is not None]
        parts = [rows.weight for rows in self.sides] + [part for one in inner for part in one.parts()]
        leaves: dict[int, tuple[str, Any]] = {}
        for part in parts:
            stored: dict[str, Any] = {"": part.read()} if part.is_stored else part.parameters()
            for name, leaf in stored.items():
                leaves.setdefault(id(leaf), (f"{part.name}: {name}" if name else part.name, leaf))
        return {name: leaf for name, leaf in leaves.values() if leaf.requires_grad}

    def value(self, scale: Scale) -> Float[Tensor, ""]:
        """The sum of a scale over all heads, as a scalar of the autograd graph."""
        weights = self.weights()
        if self.key_inner is not None:
            with torch.autocast(weights[0].device.type, enabled=False):
                return scale.value(self._products(self.key_inner), d_model=self.d_model).sum()
        if any(hasattr(one, "ds_id") for one in weights):
            got = "those that DeepSpeed ZeRO-3 has partitioned"
            raise refusal("whole weights for a penalty in the loss", got, "give the optimizer: decoupled")
        if torch.compiler.is_compiling():
            return _traced(self, scale, weights)
        return _Value.apply(self, scale, *weights)

    def slopes(self, scale: Scale) -> list[Tensor]:
        """The gradient of that sum by each leaf."""
        if self.is_stored:
            weights, shard = self.weights(), self.shard()
            gradients = zip(weights, shard.scatter(*self._by_heads(shard, scale)[1]), strict=True)
            return [by for weight, by in gradients if weight.requires_grad]
        with torch.enable_grad():
            total = self.value(scale)
        leaves = list(self.leaves().values())
        return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))

    def descend(self, scale: Scale, rates: Rates) -> Bool[Tensor, ""]:
        """One decoupled step on that sum, W −= lr·∇/s, lr and s as the optimiser has them.

        s = √(v + mean ∇²) for each head's query and key, v the mean of Adam's second moment over them: what the
        optimiser would divide by if ∇ stood in the loss, so that one strength means the same in both forms, and no
        entry moves by much more than lr. s = 1 where the optimiser keeps no second moment (SGD). Of computed weights
        the means are over each whole leaf. Returns whether all was finite, as a tensor, without a wait for the GPU.
        """
        if not self.is_stored:
            slopes = self.slopes(scale)
            for (name, leaf), by in zip(self.leaves().items(), slopes, strict=True):
                known = rates.second_moment(leaf)
                square = None if known is None else known[0].mean() * known[1] + by.square().mean()
                unit, value = 1.0 if square is None else square.sqrt().clamp_min(TINY), current(leaf)
                write_master(leaf, value.sub_(by.to(value.dtype) / unit, alpha=rates.learning_rate(leaf, name)))
            return torch.stack([torch.isfinite(whole(by)).all() for by in slopes]).all()
        weights, shard = self.weights(), self.shard(exact=True)
        grams, gradients = self._by_heads(shard, scale)
        units = self._units(shard, gradients, rates)
        sides = zip((shard.query, shard.key), gradients, units, self.sides, (weights[0], weights[-1]), strict=True)
        for heads, by_weight, unit, rows, weight in sides:
            if weight.requires_grad:
                rate = rates.learning_rate(weight, rows.weight.name)
                heads.addcdiv_(by_weight, unit, value=-rate) if unit is not None else heads.sub_(by_weight, alpha=rate)
        shard.commit()
        return grams.is_finite

    def _units(self, shard: HeadShard, gradients: tuple[Tensor, Tensor], rates: Rates) -> list[Tensor | None]:
        """s for every head's query and key; None for 1."""
        moments = [known for weight in shard.weights if (known := rates.second_moment(weight)) is not None]
        if len(moments) < len(shard.weights):
            return [None, None]
        means = self.shard([mean for mean, _ in moments])
        sides = zip((means.query, means.key), gradients, (moments[0][1], moments[-1][1]), strict=True)
        units = []
        for heads, gradient, correction in sides:
            total = heads.sum((-2, -1)) * correction + torch.linalg.vector_norm(gradient, dim=(-2, -1)).square()
            square = shard.complete_sums(total) / (heads.shape[-2] * self.d_model)
            units.append(square.sqrt().clamp_min(TINY)[..., None, None])
        return units

    def _by_heads(self, shard: HeadShard, scale: Scale) -> tuple[Grams, tuple[Tensor, Tensor]]:
        """Compute the Gram products of the local heads, and the gradient by their queries and keys."""
        # A stabiliser that is attached, or steps, inside of autocast computes with the weights as they are stored.
        with torch.autocast(shard.query.device.type, enabled=False):
            grams = _grams_of(shard)
            slope = scale.on(shard.groups).slope(grams, d_model=self.d_model)
            return grams, pull_back(slope, shard.query, shard.key)

    def squares(self, gradients: Sequence[Tensor]) -> Float[Tensor, " groups"]:
        """Squared norms of gradients by the leaves, for each group of heads where these can be separated."""
        if not self.is_stored:
            return torch.stack([whole(one.square().sum()) for one in gradients]).sum()[None]
        weights, parts = self.weights(), iter(gradients)
        shard = self.shard([next(parts) if one.requires_grad else torch.zeros_like(one) for one in weights])
        sides = [side.square().sum((1, 2, 3)) for side in (shard.query, shard.key)]
        return shard.everywhere(shard.complete_sums(sides[0] + sides[1])[:, None])[:, 0]

    def traces(self) -> PerHead:
        """tr W of all heads, on every rank."""
        if self.key_inner is not None:
            return self._products(self.key_inner).trace
        shard = self.shard()
        return shard.everywhere(shard.traces())

    def moments(self) -> Moments:
        """tr W, tr W² and ‖W‖² of all heads, on every rank."""
        if self.key_inner is not None:
            return moments_of(self._products(self.key_inner), d_model=self.d_model)
        shard = self.shard()
        moments = moments_of(_grams_of(shard), d_model=self.d_model)
        sums = (moments.trace, moments.trace_of_square, moments.frobenius_squared)
        return Moments(*map(shard.everywhere, sums), d_model=moments.d_model, d_head=moments.d_head)

    def clip(self, factors: PerHead) -> None:
        """Scale every logit of head h by factors[h], in the weights and biases.

        Half to the query and half to the key; shared or frozen keys leave it all to the query. In latent attention
        q_nope and k_nope by √γ, q_rope by γ, the shared k_rope as it is (Kimi's MuonClip).
        """
        if not any(rows.weight.is_trained for rows in self.sides):  # frozen since: what stands still needs no clip
            return
        moved = [rows for rows in self.sides if rows.weight.is_trained and rows.num_heads == self.query.num_heads]
        if not moved or (self.key_inner is not None and not self.query.weight.is_trained):
            raise refusal("trained queries to clip, where keys are shared", f"frozen ones in {self.name}")
        half = factors.sqrt() if len(moved) == 2 else factors
        for rows in moved:
            nope, rope = ((one[..., None].expand(-1, -1, rows.d_head)) for one in (half, factors))
            rows.scale(torch.cat([nope[..., : self.key.d_head], rope[..., self.key.d_head :]], -1))

    # -------------------------------------------------------------------------------------------- latent attention
    def _products(self, key_inner: Inner) -> Grams:
        """M, G_Q and G_K of all heads as (heads, 1, d_h, d_h), differentiable by every part; gathers shards."""
        up_key, down_key = _factors(self.key, key_inner)
        if self.query_inner is None:
            query = self.query.view(_full(self.query.weight))
            core = up_key @ (down_key @ query.mT)
            return Grams(core, query @ query.mT, up_key @ (down_key @ down_key.mT) @ up_key.mT)
        up_query, down_query = _factors(self.query, self.query_inner)
        core, own, key = gram_products(down_query, down_key)
        return Grams(up_key @ core @ up_query.mT, up_query @ own @ up_query.mT, up_key @ key @ up_key.mT)


def _factors(rows: Rows, inner: Inner) -> tuple[Tensor, Tensor]:
    """U of every head, and the A that all of them share."""
    up, down = rows.view(_full(rows.weight)), _full(inner.down)
    up = up if inner.gain is None else up * _full(inner.gain)
    if direct := len(down) - inner.rank:
        same = torch.eye(direct, dtype=up.dtype, device=up.device).expand(*up.shape[:2], -1, -1)
        blank = up.new_zeros(*up.shape[:2], up.shape[2], direct), up.new_zeros(*up.shape[:2], direct, inner.rank)
        up = torch.cat([torch.cat([up, blank[0]], -1), torch.cat([blank[1], same], -1)], -2)
    return up, down


def _full(weight: LiveWeight) -> Tensor:
    return widen(whole(weight.read()))


class _Value(torch.autograd.Function):
    """Backward: ∇_Q and ∇_K from the slopes, four d_h×d_h×d products per head."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, scale: Scale, *weights: Tensor) -> Tensor:
        with torch.autocast(weights[0].device.type, enabled=False):
            shard = pair.shard(weights)
            grams, scale = _grams_of(shard), scale.on(shard.groups)
            ctx.pair = pair
            ctx.save_for_backward(*weights, *scale.slope(grams, d_model=pair.d_model))
            return shard.total(scale.value(grams, d_model=pair.d_model))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_value: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore
        *weights, core, query, key = ctx.saved_tensors
        with torch.autocast(core.device.type, enabled=False):
            shard = ctx.pair.shard(weights)
            slope = Grams(*(by_value[0].to(core) * matrix for matrix in (core, query, key)))
            gradients = pull_back(slope, shard.query, shard.key)
            return None, None, *shard.scatter(*gradients)


def _traced(pair: Pair, scale: Scale, weights: tuple[Tensor, ...]) -> Float[Tensor, ""]:
    """The same by autograd, for a compiler that derives and fuses by itself; plain tensors only."""
    with torch.autocast(weights[0].device.type, enabled=False):
        query, key = pair.query.view(widen(weights[0])), pair.key.view(widen(weights[-1]))
        return penalty(query, key, scale=scale).sum()


def _grams_of(shard: HeadShard) -> Grams:
    """Compute the Gram products of the local heads, over all columns."""
    return shard.complete(gram_products(shard.query, shard.key))


def check_stored(pairs: Sequence[Pair], what: str, remedy: str) -> None:
    """For what writes into weights: of computed ones (LoRA, a parametrisation) it would write into a copy."""
    for pair in pairs:
        if not all(rows.weight.is_stored and rows.is_bias_stored for rows in pair.sides):
            raise refusal(f"plain parameters to {what}", f"computed weights in {pair.name}", remedy)


def num_heads(pairs: Sequence[Pair], name: str) -> int:
    """The heads of a module, of which pairs may be a part each."""
    return max(pair.first + math.prod(pair.shape) for pair in pairs if pair.name == name)
