"""All heads of a layer at once: from layer inputs to final queries and keys, and on to their statistics.

Equal to `Head.logits` head by head, but every projection and every norm over a whole projection runs once. Also bounds
on logits that need no input: from the weights of a layer's heads, behind the norm before them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from ..errors import missing, refusal
from ..head import Head
from ..positions import Alibi, Buckets, Rotary
from ..projections import Projection, widen
from ..quantities import NEAR
from ..spectra import Grams, gram_products
from ..spectra.singular import singular_values_of_grams
from .masks import Mask
from .statistics import Statistics
from .streaming import Bias, Blocks, Scores, stream

Positions = tuple[Int[Tensor, "#batch queries"], Int[Tensor, "#batch keys"]]


def project(
    projections: Sequence[Projection], x: Float[Tensor, "batch tokens d_model"]
) -> Float[Tensor, "batch heads tokens d_head"]:
    """norm(W x + b) of all projections of one side of a layer; 16-bit products are widened before any norm."""
    rows = _biased_rows(projections, x)
    if projections[0].norm is not None:
        rows = _with_gains(projections, _normalise(projections, rows, x))
    return rearrange(rows, "batch tokens heads d -> batch heads tokens d")


def _biased_rows(projections: Sequence[Projection], x: Tensor) -> Float[Tensor, "batch tokens heads d_head"]:
    rows = _rows(projections, x)
    if (bias := _stack([one.bias for one in projections])) is not None:
        rows = rows + bias.to(rows)
    return widen(rows)


def _with_gains(projections: Sequence[Projection], rows: Tensor) -> Float[Tensor, "batch tokens heads d_head"]:
    gain = _stack([one.norm and one.norm.gain for one in projections])
    bias = _stack([one.norm and one.norm.bias for one in projections])
    rows = rows if gain is None else rows * gain.to(rows)
    return rows if bias is None else rows + bias.to(rows)


def _stack(vectors: Sequence[Tensor | None]) -> Tensor | None:
    """One row per head; None if the heads have none."""
    present = [vector for vector in vectors if vector is not None]
    assert len(present) in (0, len(vectors)), "heads of one layer are alike"
    return torch.stack(present) if present else None


def _rows(projections: Sequence[Projection], x: Tensor) -> Float[Tensor, "batch tokens heads d_head"]:
    """W x; where W is low-rank, its first rows go through the inner norm, which the heads of a layer share."""
    low_rank, num_heads = projections[0].low_rank, len(projections)
    if low_rank is None:
        weight = torch.cat([one.weight for one in projections])
        return linear(x, weight.to(x)).unflatten(-1, (num_heads, -1))
    all_up = replace(low_rank, up=torch.cat([one.low_rank.up for one in projections if one.low_rank]))
    num_low = low_rank.up.shape[0]
    direct = torch.cat([one.weight[num_low:] for one in projections])
    parts = all_up(x), linear(x, direct.to(x))
    return torch.cat([part.unflatten(-1, (num_heads, -1)) for part in parts if part.shape[-1]], -1)


def _normalise(projections: Sequence[Projection], rows: Tensor, x: Tensor) -> Tensor:
    """QK-norm without its gain and bias: over each head's rows, or over all heads' if its statistics run there."""
    norm, whole = projections[0].norm, projections[0].whole
    assert norm is not None
    norm = replace(norm, gain=None, bias=None)
    if whole is None:
        return norm(rows)
    over = linear(x, whole.weight.to(x), None if whole.bias is None else whole.bias.to(x))
    return norm(rows.flatten(-2), over=widen(over)).unflatten(-1, rows.shape[-2:])


def queries_and_keys(
    heads: Sequence[Head],
    x_query: Float[Tensor, "batch queries d_model"],
    x_key: Float[Tensor, "batch keys d_key"],
    positions: Positions | None = None,
) -> tuple[Float[Tensor, "batch heads queries d_head"], Float[Tensor, "batch key_heads keys d_head"]]:
    """Normed and rotated, not scaled. Heads that share a key get it once if they come in equal groups, in order."""
    sides = [head.query for head in heads], [head.key for head in _key_heads(heads)]
    rotary = heads[0].rotary
    if rotary is None:
        return project(sides[0], x_query), project(sides[1], x_key)
    counted = (torch.arange(x.shape[1], device=x.device)[None] for x in (x_query, x_key))
    query_positions, key_positions = positions or counted
    length = 1 + int(max(query_positions.max(), key_positions.max()))
    if heads[0].turns_first:
        queries = _turned_first(sides[0], x_query, rotary, query_positions, length)
        return queries, _turned_first(sides[1], x_key, rotary, key_positions, length)
    queries = rotary.rotate(project(sides[0], x_query), query_positions[:, None], length=length)
    return queries, rotary.rotate(project(sides[1], x_key), key_positions[:, None], length=length)


def _turned_first(side: Sequence[Projection], x: Tensor, rotary: Rotary, positions: Tensor, length: int) -> Tensor:
    """Turned, then normed; `Head` sees to it that the norms are of each head alone."""
    rows = rearrange(_biased_rows(side, x), "batch tokens heads d -> batch heads tokens d")
    turned = rotary.rotate(rows, positions[:, None], length=length)
    rows = rearrange(turned, "batch heads tokens d -> batch tokens heads d")
    rows = _with_gains(side, _normalise(side, rows, x))
    return rearrange(rows, "batch tokens heads d -> batch heads tokens d")


def _key_heads(heads: Sequence[Head]) -> Sequence[Head]:
    """One head per key where the grouping is regular; every head where it is not, or is not known."""
    groups: dict[int | None, list[Head]] = {}
    for head in heads:
        groups.setdefault(head.key_index, []).append(head)
    in_order = [head for group in groups.values() for head in group] == list(heads)
    if None in groups or not in_order or len({len(group) for group in groups.values()}) > 1:
        return heads
    return [group[0] for group in groups.values()]


@dataclass(frozen=True)
class LayerBias:
    """The position biases of a layer's heads, stacked."""

    heads: Sequence[Head]

    def __call__(self, distance: Int[Tensor, "batch queries keys"]) -> Float[Tensor, "batch heads queries keys"]:
        biases = [head.position_bias for head in self.heads]
        slopes = [bias.slope for bias in biases if isinstance(bias, Alibi)]
        if slopes:
            return -torch.tensor(slopes, device=distance.device)[:, None, None] * distance[:, None]
        buckets = [bias for bias in biases if isinstance(bias, Buckets)]
        tables = torch.stack([bias.table for bias in buckets])
        return tables[:, buckets[0].bucket(distance)].movedim(0, 1)


@torch.no_grad()
def observe(
    heads: Sequence[Head],
    x_query: Float[Tensor, "batch queries d_model"],
    x_key: Float[Tensor, "batch keys d_key"],
    *,
    mask: Mask | None = None,
    positions: Positions | None = None,
    sample: Int[Tensor, " chosen"] | None = None,
    near: int = NEAR,
    blocks: Blocks | None = None,
) -> Statistics:
    """The statistics of a layer's heads on its inputs. Causality and window are the heads' own; `mask` adds the rest.

    `positions` turn rotary heads only; `sample` names the queries to look at, all if None.
    """
    head = _check(heads)
    mask = replace(mask or Mask(), lookback=head.lookback, lookahead=head.lookahead)
    mask = mask.counted(x_query.shape[1], x_key.shape[1], x_query.device)
    if sample is not None:
        x_query, mask = x_query[:, sample], mask.at(sample)
        counted = torch.arange(x_key.shape[1], device=x_key.device)[None]
        positions = (sample[None], counted) if positions is None else (positions[0][:, sample], positions[1])
    queries, keys = queries_and_keys(heads, x_query, x_key, positions)
    bias: Bias | None = None if head.position_bias is None else LayerBias(heads)
    scores = Scores(head.scale, head.softcap, bias, _stack([head.sink for head in heads]))
    return stream(queries, keys, mask=mask, scores=scores, near=near, blocks=blocks)


def _check(heads: Sequence[Head]) -> Head:
    """The first head, which speaks for all: heads of one layer differ in weights, slopes and tables only."""
    if not heads:
        raise missing("at least one head")
    names = ("block", "layer", "scale", "rotary", "softcap", "lookback", "lookahead", "turns_first")
    if len({tuple(getattr(head, name) for name in names) for head in heads}) > 1:
        raise refusal("heads of one layer", "heads that differ in their layer, scale, rotary positions or window")
    return heads[0]


def sample_queries(num_queries: int, num_wanted: int, generator: torch.Generator) -> Int[Tensor, " chosen"] | None:
    """Draw queries without replacement, in order; None if all are wanted."""
    if num_wanted >= num_queries:
        return None
    return torch.randperm(num_queries, generator=generator)[:num_wanted].sort().values


@torch.no_grad()
def bounds_by_weights(heads: Sequence[Head]) -> Float[Tensor, " heads"]:
    """No logit of a head can exceed its bound; NaN where nothing is known to bound it, or weights are products."""
    if any(side.low_rank is not None for head in heads for side in (head.query, head.key)):
        return torch.full((len(heads),), torch.nan)
    query, key = (torch.stack([getattr(head, side).weight.detach() for head in heads]) for side in ("query", "key"))
    query, key = with_gain(query, heads[0].query), with_gain(key, heads[0].key)
    products = gram_products(query, key)
    sigma = singular_values_of_grams(products.query, products.key)[:, 0]
    return bounds_of(heads, products, sigma, query.shape[-1])


def with_gain(weight: Tensor, projection: Projection) -> Tensor:
    """A copy, so that the next report can tell what has changed; the heads of a layer share the norm before them.

    Centred behind a layer norm, whose output has mean 0: see `Norm.fold`.
    """
    norm = projection.input_norm
    weight = weight.float() * (1.0 if norm is None or norm.gain is None else norm.gain.detach().float())
    return weight - weight.mean(-1, keepdim=True) if norm is not None and norm.kind == "layer" else weight


def bounds_of(heads: Sequence[Head], products: Grams, sigma: Tensor, d_model: int) -> Float[Tensor, " heads"]:
    """No logit can exceed σ₁(W)·d/λ, for a norm gives inputs of length √d at most (Cauchy and Schwarz).

    Where rotary positions or biases stand between, (σ₁(W_Q)√d + |b_Q|)·(σ₁(W_K)√d + |b_K|)/λ instead. NaN where no
    norm is known before, or one stands behind; a soft-cap bounds by itself.
    """
    head = heads[0]
    if head.softcap is not None:
        return torch.full_like(sigma, head.softcap)
    if head.query.input_norm is None or head.key.input_norm is None or head.query.norm is not None:
        return torch.full_like(sigma, torch.nan)
    biases = torch.tensor([[_length(side) for side in (one.query, one.key)] for one in heads]).to(sigma)
    if head.rotary is None and not bool(biases.any()):
        return sigma * d_model / head.temperature
    sides = torch.stack([_largest(gram) for gram in (products.query, products.key)], -1)
    return (sides * d_model**0.5 + biases).prod(-1) / head.temperature


def _largest(gram: Tensor) -> Tensor:
    """σ₁ of a factor, or a bound on it where its Gram matrix is not finite."""
    finite = gram.isfinite().all(-1).all(-1)[..., None, None]
    return torch.linalg.eigvalsh(gram.double().where(finite, 0.0))[..., -1].sqrt().where(finite[..., 0, 0], torch.nan)


def _length(side: Projection) -> float:
    """|b| with the norm's bias taken through the weights."""
    bias = side.folded().bias if side.input_norm is not None and side.input_norm.bias is not None else side.bias
    return 0.0 if bias is None else float(bias.detach().norm())
