"""Exact attention statistics without the T×T matrix: block by block, with a running maximum.

Cost: one pass over the admitted blocks, about that of the attention itself; memory O(T) and a few blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import refusal
from ..projections import widen
from ..quantities import NEAR
from .fold import (
    CLOSE,
    DISTANCE,
    FIRST,
    IN_CACHE,
    SHIFTED,
    SQUARE,
    TOTAL,
    UNIT,
    Block,
    Room,
    Running,
    absorb_far,
    absorb_near,
    cut,
    nothing_seen,
    pieces,
    with_sinks,
)
from .masks import Mask
from .plan import KeyBlock, Plan
from .statistics import Statistics, finish

Bias = Callable[[Int[Tensor, "batch queries keys"]], Float[Tensor, "batch heads queries keys"]]


@dataclass(frozen=True, eq=False)
class Scores:
    """Making of logits from the products of queries and keys: softcap(scale · q·k) + bias.

    `bias` takes distances, query minus key position. `sinks` are learned logits, one per head, of a key that is no
    token: it takes mass, and counts in the entropy.
    """

    scale: float = 1.0
    softcap: float | None = None
    bias: Bias | None = None
    sinks: Float[Tensor, " heads"] | None = None


@dataclass(frozen=True)
class Blocks:
    """Limits of the memory held at once: queries × keys of a block, and logits over all heads and sequences together.

    Blocks are long, because many small ones cost more in calls than they save in cache.
    """

    queries: int = 128
    keys: int = 2048
    logits: int = 1 << 21


@torch.no_grad()
def stream(
    queries: Float[Tensor, "batch heads queries d_head"],
    keys: Float[Tensor, "batch key_heads keys d_head"],
    *,
    mask: Mask | None = None,
    scores: Scores | None = None,
    near: int = NEAR,
    blocks: Blocks | None = None,
) -> Statistics:
    """The statistics of softmax(softcap(scale · q·k) + bias) over the admitted keys, for every query of every head.

    Queries and keys are final: normed and rotated. Consecutive query heads share a key head if there are fewer of
    those. 16-bit input is computed with in float32.
    """
    num_heads, num_key_heads = queries.shape[1], keys.shape[1]
    if num_heads % num_key_heads:
        raise refusal("a number of heads that is a multiple of the key heads", f"{num_heads} and {num_key_heads}")
    blocks, scores = blocks or Blocks(), scores or Scores()
    mask = (mask or Mask()).counted(queries.shape[2], keys.shape[2], queries.device)
    grouped = queries.unflatten(1, (num_key_heads, -1))
    empty, room = widen(queries.new_empty(0)).new_empty, Room(min(IN_CACHE, blocks.logits))
    whole = Running(empty(grouped.shape[:-1]), empty(6, *grouped.shape[:-1]))  # every query's sums
    num_keys = torch.empty(grouped.shape[:-1], dtype=torch.long, device=queries.device)
    one = grouped.shape[2] * min(queries.shape[2], blocks.queries) * min(keys.shape[2], blocks.keys)
    for batch, groups in pieces(len(queries), num_key_heads, one=one, most=blocks.logits):
        heads = slice(groups.start * grouped.shape[2], groups.stop * grouped.shape[2])
        part = _Part(grouped[batch, groups], keys[batch, groups], mask.part(batch, heads), scores, near, blocks, room)
        for rows in cut(queries.shape[2], blocks.queries):
            found, admitted = part.rows(rows, heads)
            whole.maximum[batch, groups, :, rows] = found.maximum
            whole.sums[:, batch, groups, :, rows] = found.sums
            num_keys[batch, groups, :, rows] = admitted
    maximum, sums, num_keys = whole.maximum.flatten(1, 2), whole.sums.flatten(2, 3), num_keys.flatten(1, 2)
    return _statistics(maximum, sums, num_keys, mask, scores.sinks)


@dataclass
class _Part:
    """Batch of sequences and heads that are worked on at once."""

    queries: Float[Tensor, "batch groups ratio queries d_head"]
    keys: Float[Tensor, "batch groups keys d_head"]
    mask: Mask
    scores: Scores
    near: int
    blocks: Blocks
    room: Room  # memory that all blocks share

    def __post_init__(self):
        self.plan = Plan(self.mask, near=self.near, key_block=self.blocks.keys)
        self.first = self.mask.first_keys()
        known = self.first[self.first >= 0]
        self.first_range = (int(known.min()), int(known.max())) if len(known) else (-1, -1)
        self.is_first_shared = len(known) == self.first.numel() and self.first_range[0] == self.first_range[1]

    def rows(self, rows: slice, heads: slice) -> tuple[Running, Tensor]:
        """The sums of one block of queries over all its keys, and how many keys each query has."""
        queries = widen(self.queries[..., rows, :]) * (self.scores.scale / UNIT)
        running = nothing_seen(queries)
        num_keys = torch.zeros((), dtype=torch.long, device=queries.device)
        for block in self.plan.key_blocks(rows):
            keys = widen(self.keys[..., block.keys, :])
            extra = self._extra(rows, block, heads)
            # Sums are of exponentials relative to the largest logit so far: without it the first sharp head overflows.
            running = self._absorb(running, queries, keys, rows, block, extra)
            size = block.keys.stop - block.keys.start
            num_keys = num_keys + (size if extra.admitted is None else extra.admitted.sum(-1))
        return running, num_keys

    def _absorb(
        self, running: Running, queries: Tensor, keys: Tensor, rows: slice, block: KeyBlock, extra: Block
    ) -> Running:
        if block.side == 0:
            distance = self.mask.distance(rows, block.keys).abs().to(queries)
            return absorb_near(running, queries, keys, extra, self.scores.softcap, distance, self.near)
        query_positions, key_positions = self.mask.positions(rows, block.keys)
        nearest = key_positions.amax(-1, True) if block.side > 0 else key_positions.amin(-1, True)
        # Measured from the block's nearest key, both parts are positive: no digits are lost in a difference.
        offset, inner = ((query_positions - nearest).abs(), (nearest - key_positions).abs())
        offset, inner = offset.to(queries), inner.to(queries)
        return absorb_far(running, queries, keys, extra, self.scores.softcap, offset, inner)

    def _extra(self, rows: slice, block: KeyBlock, heads: slice) -> Block:
        admitted = added = first = None
        groups, bias = self.queries.shape[1], self.scores.bias
        if block.masked:
            admitted = self.mask.block(rows, block.keys)
            per_head = (groups, -1) if admitted.shape[1] > 1 else (1, 1)
            admitted = admitted.unflatten(1, per_head)
        if bias is not None:
            added = widen(bias(self.mask.distance(rows, block.keys))[:, heads]).unflatten(1, (groups, -1))
            added = added.to(widen(self.queries[:0]))
        if self.mask.added is not None:
            dense = widen(self.mask.added[:, :, rows, block.keys]).to(widen(self.queries[:0]))
            dense = dense.unflatten(1, (groups, -1) if dense.shape[1] > 1 else (1, 1))
            added = dense if added is None else added + dense
        if self.first_range[0] < block.keys.stop and self.first_range[1] >= block.keys.start:
            shared = self.first_range[0] - block.keys.start
            first = shared if self.is_first_shared else self.first[:, rows] - block.keys.start
        return Block(admitted, added, first, self._score(rows, block.keys), self.room)

    def _score(self, rows: slice, keys: slice) -> Callable[[Tensor], Tensor] | None:
        """FlexAttention's change of logits for one block; it speaks of heads, not of groups of them."""
        rule = self.mask.rule
        if rule is None or rule.score is None:
            return None
        return lambda logits: rule.scored(logits.flatten(1, 2), rows, keys).unflatten(1, logits.shape[1:3])


def _statistics(maximum: Tensor, sums: Tensor, num_keys: Tensor, mask: Mask, sinks: Tensor | None = None) -> Statistics:
    if mask.query_valid is not None:
        num_keys = num_keys * mask.query_valid[:, None]
    if sinks is not None:
        sums = with_sinks(maximum, sums, widen(sinks)[:, None] / UNIT)
        num_keys = num_keys + (num_keys > 0)
    total = sums[TOTAL]
    return finish(
        entropy=(total.log() - sums[SHIFTED] / total * UNIT).clamp(min=0),
        max_logit=maximum * UNIT,
        sink_mass=sums[FIRST] / total,
        near_mass=sums[CLOSE] / total,
        mean_distance=sums[DISTANCE] / total,
        participation=total.square() / sums[SQUARE],
        num_keys=num_keys,
    )
