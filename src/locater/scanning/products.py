"""The Gram products of a batch of heads, norms folded in; and the bounds of their logits that follow.

Weights are widened and folded in one small buffer, some groups of heads at a time: nothing as large as a layer is
copied, and what is multiplied is still in the cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..head import Head
from ..positions import Alibi, Buckets
from ..projections import Norm, Projection, widen
from ..spectra import Grams, side_norms
from .batch import HeadBatch

ROWS_AT_ONCE = 256
CACHE_BYTES = 2**22  # weights that are folded and multiplied at a time, unless one group has more


class FoldedNorms:
    """norm(W x) as a matrix, its divisor taken at its root mean square over white x.

    What a norm over all heads needs of the whole projection, or an inner norm of the down projection, is summed once.
    """

    def __init__(self, *, raw: bool) -> None:
        self.raw = raw
        self.sums: dict[tuple[int, int], tuple[object, Tensor, Tensor]] = {}

    def apply(self, rows: Float[Tensor, "heads d_head d_model"], projections: Sequence[Projection]) -> None:
        """Change the folded rows of projections of one kind in place."""
        first = projections[0]
        low_rank, norm = first.low_rank, first.norm
        if low_rank is not None and low_rank.norm is not None:
            inner = low_rank.norm
            if inner.kind == "layer":  # the mean is taken inside, between down and up
                whole = projections if self.raw else [projection.folded() for projection in projections]
                rows.copy_(torch.stack([projection.linearised() for projection in whole]))
                return
            _, square = self._shared(low_rank.down, first)
            rows[:, : len(low_rank.up)] *= _factor(inner, square, len(low_rank.down))
        if norm is not None:
            self._outer(rows, norm, projections)

    def _outer(self, rows: Tensor, norm: Norm, projections: Sequence[Projection]) -> None:
        whole = projections[0].whole
        if whole is None:
            centre, square, count = rows.mean(1, keepdim=True), rows.square().sum((1, 2)), rows.shape[1]
        else:
            (centre, square), count = self._shared(whole.weight, projections[0]), len(whole.weight)
        if norm.kind == "layer":
            rows -= centre
            square = square - count * centre.square().sum((-2, -1) if whole is None else -1)
        rows *= _factor(norm, square, count)[..., None, None]
        gains = [side.norm.gain for side in projections if side.norm is not None and side.norm.gain is not None]
        if gains:
            rows *= torch.stack(gains).to(rows)[..., None]

    def _shared(self, weight: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """The mean row of a folded weight, and the sum of its squares."""
        norm = None if self.raw else projection.input_norm
        key = id(weight), id(norm)
        if key not in self.sums:
            self.sums[key] = (weight, norm), *_column_sums(weight, norm)  # held, so that no other takes their ids
        _, totals, square = self.sums[key]
        return totals / len(weight), square


def _column_sums(weight: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Sums down the columns of a folded weight, and the sum of all squares, some rows at a time."""
    totals = torch.zeros_like(widen(weight[0].detach()))
    square = torch.zeros_like(totals[0])
    for block in weight.detach().split(ROWS_AT_ONCE):
        block = widen(block).clone()
        _fold(block, norm)
        totals += block.sum(0)
        square += block.square().sum()
    return totals, square


def _factor(norm: Norm, square: Tensor, count: int) -> Tensor:
    return (square / (1 if norm.kind == "l2" else count) + norm.epsilon).rsqrt()


class SideBiases(NamedTuple):
    """Biases on every query and key of the normalised input, W b_norm + b.

    None where nothing is, where weights are taken as stored, and where a norm behind the projection would change it.
    """

    query: Float[Tensor, "groups heads d_head"] | None = None
    key: Float[Tensor, "groups 1 d_head"] | None = None


@dataclass(frozen=True, eq=False)
class Products:
    """Products of a batch's weights, from one pass over them.

    `grams` are (groups, heads, d_h, d_h), the key's (groups, 1, d_h, d_h). `queries` are W_Q x of the inputs that were
    given, biases included.
    """

    grams: Grams
    queries: Float[Tensor, "groups heads d_head inputs"]
    biases: SideBiases


def multiply(
    batch: HeadBatch,
    x: Float[Tensor, "inputs d_model"] | None = None,
    *,
    raw: bool,
    linear: FoldedNorms | None = None,
) -> Products:
    """The products of all heads of a batch, and W_Q x: beside W_Q W_Q^T it costs little.

    `raw` takes the weights as stored, else the input norm's gain is folded in; `linear` puts the norms behind the
    projections into them.
    """
    buffer = _Buffer(batch, x, raw=raw, linear=linear)
    for start in range(0, batch.num_groups, buffer.num_groups):
        buffer.take(start)
    grams = Grams(buffer.core, buffer.query_grams, buffer.key_grams)
    if raw:
        return Products(grams, buffer.queries, SideBiases())
    sides = (batch.queries, buffer.query_shift), (batch.keys, buffer.key_shift)
    biases = SideBiases(*(_total(*side, batch.num_groups) for side in sides)) if batch.is_linear else SideBiases()
    queries = buffer.queries if x is None or biases.query is None else buffer.queries + biases.query[..., None]
    return Products(_amplified(grams, batch.first), queries, biases)


def _total(side: Sequence[Projection], shift: Tensor | None, num_groups: int) -> Tensor | None:
    """The projections' own biases and `shift`, W b of the input norm's bias b before its gain is folded in."""
    own = [projection.bias for projection in side if projection.bias is not None]
    if not own:
        return shift
    total = widen(torch.stack(own)).unflatten(0, (num_groups, -1))
    return total if shift is None else total + shift


class _Buffer:
    """Room for the weights of some groups, keys first, and for all that they are multiplied into."""

    def __init__(self, batch: HeadBatch, x: Tensor | None, *, raw: bool, linear: FoldedNorms | None) -> None:
        self.batch, self.raw, self.linear = batch, raw, linear
        weight, groups, heads, size = batch.first.query.weight, batch.num_groups, batch.per_group, batch.first.d_head
        self.stored_transposed = weight.stride(0) < weight.stride(1)  # copying into another order is slow
        self.empty = widen(weight[:0]).new_empty
        self.x = self.empty(0, batch.first.d_model) if x is None else x.to(self.empty(0))
        group_bytes = (1 + heads) * weight.numel() * self.x.element_size()
        self.num_groups = min(groups, max(1, CACHE_BYTES // group_bytes))
        self.core = self.empty(groups, heads, size, size)
        self.query_grams, self.key_grams = torch.empty_like(self.core), self.empty(groups, 1, size, size)
        self.queries = self.empty(groups, heads, size, len(self.x))
        query_norm, key_norm = batch.first.query.input_norm, batch.first.key.input_norm
        self.query_shift = self.empty(groups, heads, size) if _has_bias(query_norm) and not raw else None
        self.key_shift = self.empty(groups, 1, size) if _has_bias(key_norm) and not raw else None

    def take(self, start: int) -> None:
        """Multiply the groups from `start` on, as many as there is room for."""
        stop = min(start + self.num_groups, self.batch.num_groups)
        keys, queries = self._fill(start, stop)
        heads, size = self.batch.per_group, self.batch.first.d_head
        flat = queries.flatten(0, 1)
        core = keys @ flat.unflatten(0, (stop - start, heads * size)).mT
        self.core[start:stop] = core.unflatten(-1, (heads, size)).transpose(1, 2)
        torch.bmm(keys, keys.mT, out=self.key_grams[start:stop, 0])
        torch.bmm(queries, queries.mT, out=self.query_grams[start:stop].flatten(0, 1))
        if len(self.x):
            self.queries[start:stop] = (flat @ self.x.mT).view(stop - start, heads, size, -1)

    def _fill(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copy the keys and queries of some groups, and fold their norms in."""
        heads, size = self.batch.per_group, self.batch.first.d_head
        key_side, query_side = self.batch.keys[start:stop], self.batch.queries[start * heads : stop * heads]
        shape = (len(key_side) + len(query_side)) * size, self.batch.first.d_model
        rows = self.empty(shape[::-1]).mT if self.stored_transposed else self.empty(shape)
        both = rows.unflatten(0, (-1, size))
        weights = [side.weight for side in (*key_side, *query_side)]
        torch._foreach_copy_(list(both), weights)  # pyright: ignore[reportPrivateImportUsage]
        keys, queries = both.split([len(key_side), len(query_side)])
        if not self.raw:
            self._fold(both, keys, queries, start, stop)
        if self.linear is not None:
            self.linear.apply(keys, key_side)
            self.linear.apply(queries, query_side)
        return keys, queries

    def _fold(self, both: Tensor, keys: Tensor, queries: Tensor, start: int, stop: int) -> None:
        key_norm, query_norm = self.batch.first.key.input_norm, self.batch.first.query.input_norm
        for side, norm, shift in ((keys, key_norm, self.key_shift), (queries, query_norm, self.query_shift)):
            if shift is not None and norm is not None and norm.bias is not None:
                shift[start:stop] = (side @ norm.bias.to(side)).view_as(shift[start:stop])
        if key_norm is query_norm:
            _fold(both, query_norm)
        else:
            _fold(keys, key_norm)
            _fold(queries, query_norm)


def _has_bias(norm: Norm | None) -> bool:
    return norm is not None and norm.bias is not None


def _fold(weights: Tensor, norm: Norm | None) -> None:
    """The gain, and a layer norm's centring: see `Norm.fold`."""
    if norm is not None and norm.gain is not None:
        weights *= norm.gain.detach().to(weights)
    if norm is not None and norm.kind == "layer":
        weights -= weights.mean(-1, keepdim=True)


def _amplified(grams: Grams, head: Head) -> Grams:
    """At offset 0 rotary positions do nothing but multiply the rows that turn by the amplitude."""
    if head.rotary is None or head.rotary.amplitude == 1:
        return grams
    rows = grams.core.new_ones(head.d_head)
    rows[head.rotary.pairs.flatten()] = head.rotary.amplitude
    return Grams(*(product * rows[:, None] * rows for product in grams))


def bound_logits(
    batch: HeadBatch, grams: Grams, sigma: Tensor, biases: SideBiases, *, temperature: float
) -> list[float | None]:
    """max |ω| of each head over all inputs and distances; None where nothing bounds it.

    With inputs of length r = √d behind their norm (gain folded):
    (σ₁(W) r² + ‖W_K^T b_Q‖ r + ‖W_Q^T b_K‖ r + |b_Q·b_K|)/λ, and under rotary positions
    (σ₁(W_Q) r + ‖b_Q‖)(σ₁(W_K) r + ‖b_K‖)/λ. With QK-norm: the lengths that its gains allow. A soft-cap bounds too.
    """
    first = batch.first
    if first.query.norm is not None and first.key.norm is not None:
        keys = _lengths(batch.keys).repeat_interleave(batch.per_group)
        products = _lengths(batch.queries) * keys
    elif not all(side.input_norm is not None and side.is_linear for side in (first.query, first.key)):
        products = torch.full((len(batch),), math.inf, dtype=torch.float64)
    else:
        products = _by_input(batch, grams, sigma, biases)
    bounds = _with_positions(batch, products / temperature).tolist()
    return [bound if math.isfinite(bound) else None for bound in bounds]


def _by_input(batch: HeadBatch, grams: Grams, sigma: Tensor, biases: SideBiases) -> Float[Tensor, " heads"]:
    first, d_model = batch.first, batch.first.d_model
    query_radius, key_radius = _radius(first.query.input_norm, d_model), _radius(first.key.input_norm, d_model)
    if first.rotary is None:
        through = sigma.double() * query_radius * key_radius
        return (through + _bias_bound(biases, grams, (query_radius, key_radius))).flatten()
    of_query, of_key = (norm.double() for norm in side_norms(grams))  # upper bounds
    query_length = 0.0 if biases.query is None else biases.query.norm(dim=-1).double()
    key_length = 0.0 if biases.key is None else biases.key.norm(dim=-1).double()
    product = (of_query * query_radius + query_length) * (of_key * key_radius + key_length)
    return product.expand_as(sigma).flatten()


def _bias_bound(biases: SideBiases, grams: Grams, radii: tuple[float, float]) -> Tensor | float:
    """‖W_K^T b_Q‖ r + ‖W_Q^T b_K‖ r + |b_Q·b_K| of every head, the lengths by the Gram matrices: b^T W W^T b."""
    query, key, total = biases.query, biases.key, 0.0
    if query is not None:
        total = total + _stretched(query, grams.key) * radii[1]
    if key is not None:
        total = total + _stretched(key, grams.query) * radii[0]
    if query is not None and key is not None:
        total = total + (query * key).sum(-1).abs()
    return total


def _stretched(bias: Tensor, gram: Tensor) -> Tensor:
    """√(b^T G b); rounding may leave it below 0 where it is nothing."""
    return ((bias[..., None, :].to(gram) @ gram)[..., 0, :] * bias).sum(-1).clamp_min(0).sqrt()


def _radius(norm: Norm | None, d_model: int) -> float:
    return 1.0 if norm is not None and norm.kind == "l2" else math.sqrt(d_model)


def _lengths(side: Sequence[Projection]) -> Float[Tensor, " heads"]:
    """Bound the length of queries or keys after their own norm: max |gain| · √rows, and the norm's bias."""
    first, norms = side[0], [projection.norm for projection in side if projection.norm is not None]
    rows = len(first.weight if first.whole is None else first.whole.weight)
    length = 1.0 if norms[0].kind == "l2" else math.sqrt(rows)
    gains = [norm.gain for norm in norms if norm.gain is not None]
    biases = [norm.bias for norm in norms if norm.bias is not None]
    gain = torch.stack(gains).abs().amax(-1).double() if gains else torch.ones(len(side), dtype=torch.float64)
    return gain * length + torch.stack(biases).norm(dim=-1).double() if biases else gain * length


def _with_positions(batch: HeadBatch, bounds: Float[Tensor, " heads"]) -> Float[Tensor, " heads"]:
    """With the amplitude of stretched rotary positions, the soft-cap, and what distance adds."""
    first, tables = batch.first, [head.position_bias for head in batch.heads]
    if first.query.norm is not None and first.rotary is not None:
        bounds = bounds * max(1.0, first.rotary.amplitude) ** 2
    bounds = bounds if first.softcap is None else bounds.clamp(max=first.softcap)
    if isinstance(first.position_bias, Alibi):
        return bounds if first.lookahead == 0 else bounds + math.inf  # ahead, what it adds grows without end
    added = [bias.table for bias in tables if isinstance(bias, Buckets)]
    return bounds + torch.stack(added).abs().amax(-1).double() if added else bounds
