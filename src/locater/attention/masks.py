"""Masks: the one reader of what attention is given, and masks without the matrix.

A mask may be of any kind that torch has. Every other module asks here, so that it means the same to the monitor, the
stabilisers, the finder and the proof. Without the matrix it is causality, windows, padding, packed documents or any
dense mask, and answers for whole blocks first, from the extremes of positions and segments: so blocks can be skipped.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from ..errors import refusal
from ..projections import whole

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

FORBIDDEN = -9_000.0  # this or less masks: the customary −10,000 with a bias or a logit on top, and all below
KINDS = "a mask that is a plain tensor, a Parameter, a DTensor or torch's CausalBias"


class MaskArgument(NamedTuple):
    """A mask argument: a tensor of every pair, or causality alone, which admits key ≤ query + offset."""

    tensor: Tensor | None
    is_causal: bool
    offset: int = 0


def read_given(mask: object, *, is_causal: bool = False) -> MaskArgument:
    """Read the mask argument of a kernel. The memory of other subclasses than torch's own may hold anything: refused.

    Parameters and sharded tensors stay what they are, as the kernel is given them; `plain_mask` unwraps these.
    """
    if mask is None:
        return MaskArgument(None, is_causal)
    if _is_causal_bias(mask):
        is_square = mask.seq_len_q == mask.seq_len_kv or mask.variant.name == "UPPER_LEFT"
        return MaskArgument(None, True, 0 if is_square else mask.seq_len_kv - mask.seq_len_q)
    if not isinstance(mask, Tensor) or (type(mask) not in (Tensor, nn.Parameter) and not _is_sharded(mask)):
        raise refusal(KINDS, f"{type(mask).__module__}.{type(mask).__qualname__}")
    if mask.is_nested or mask.layout != torch.strided:
        raise refusal(KINDS, "a nested one" if mask.is_nested else f"one of layout {mask.layout}")
    return MaskArgument(mask, is_causal)


def plain_mask(mask: Tensor) -> Shaped[Tensor, "..."]:
    """Return any readable mask as one plain tensor, outside of the graph; causality is spelled out."""
    given = read_given(mask)
    if _is_causal_bias(mask):
        return torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool).tril(given.offset)
    return whole(mask.detach())


# Importing these modules takes longer than all else of a scan. Who has an object of their classes has imported them.
def _is_causal_bias(mask: object) -> "TypeGuard[CausalBias]":
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _is_sharded(mask: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(mask, module.DTensor)


def admits(mask: Shaped[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """True where a mask lets a key be seen, or a final logit is that of such a key; NaN passes, to be reported.

    >>> admits(torch.tensor([0.0, -3.0, -1e4, -torch.inf])).tolist()
    [True, True, False, False]
    """
    return ~(mask <= FORBIDDEN) if mask.is_floating_point() else mask.bool()


@dataclass(frozen=True, eq=False)
class Rule:
    """A mask as FlexAttention writes it: admitted(sequence, head, query, key) by index, on tensors that broadcast.

    `score(logit, sequence, head, query, key)` changes logits likewise, before the mask.
    """

    admitted: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    sequences: Int[Tensor, " batch"]
    heads: Int[Tensor, " heads"]
    queries: Int[Tensor, " queries"]
    score: Callable[..., Tensor] | None = None

    def block(self, queries: slice, keys: slice) -> Bool[Tensor, "batch heads queries_here keys_here"]:
        whose = self.admitted(*self._indices(queries, keys))
        shape = len(self.sequences), len(self.heads), queries.stop - queries.start, keys.stop - keys.start
        return whose.expand(shape)

    def scored(
        self, logits: Float[Tensor, "batch heads queries_here keys_here"], queries: slice, keys: slice
    ) -> Float[Tensor, "batch heads queries_here keys_here"]:
        return logits if self.score is None else self.score(logits, *self._indices(queries, keys)).to(logits)

    def _indices(self, queries: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        index = torch.arange(keys.start, keys.stop, device=self.queries.device)
        sequences, heads = self.sequences[:, None, None, None], self.heads[:, None, None]
        return sequences, heads, self.queries[queries][:, None], index

    def part(self, batch: slice, heads: slice) -> "Rule":
        return replace(self, sequences=self.sequences[batch], heads=self.heads[heads])


@dataclass(frozen=True, eq=False)
class Mask:
    """A key is admitted if it is valid, of the query's segment, and −lookahead ≤ query − key position ≤ lookback.

    Causal is `lookahead=0`, a window of w keys `lookback=w−1`. Positions count from 0 unless given. `dense` and `rule`
    must admit the key too. Queries that are not valid (padding) get no statistics. `added` is what a float mask adds.

    The last three only say more of a `dense` mask or a `rule`: no query sees a key before its `begin` or after its
    `last`, and `first` is the first token of its text, where segments do not tell.
    """

    lookback: int | None = None
    lookahead: int | None = None
    query_positions: Int[Tensor, "#batch queries"] | None = None
    key_positions: Int[Tensor, "#batch keys"] | None = None
    query_valid: Bool[Tensor, "#batch queries"] | None = None
    key_valid: Bool[Tensor, "#batch keys"] | None = None
    query_segments: Int[Tensor, "#batch queries"] | None = None
    key_segments: Int[Tensor, "#batch keys"] | None = None
    dense: Bool[Tensor, "#batch #heads queries keys"] | None = None
    added: Float[Tensor, "#batch #heads queries keys"] | None = None
    rule: Rule | None = None
    begin: Int[Tensor, "#batch queries"] | None = None
    last: Int[Tensor, "#batch queries"] | None = None
    first: Int[Tensor, "#batch queries"] | None = None

    def counted(self, num_queries: int, num_keys: int, device: torch.device) -> "Mask":
        """The same mask with its positions spelled out."""
        query, key = (torch.arange(number, device=device)[None] for number in (num_queries, num_keys))
        query = query if self.query_positions is None else self.query_positions
        key = key if self.key_positions is None else self.key_positions
        return replace(self, query_positions=query, key_positions=key)

    def at(self, queries: Int[Tensor, " chosen"]) -> "Mask":
        """The mask of some of the queries."""
        names = ("query_positions", "query_valid", "query_segments", "begin", "last", "first")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        chosen = {name: value[:, queries] for name, value in known.items()}
        dense, added = (None if one is None else one[..., queries, :] for one in (self.dense, self.added))
        rule = None if self.rule is None else replace(self.rule, queries=self.rule.queries[queries])
        return replace(self, **chosen, dense=dense, added=added, rule=rule)

    def part(self, batch: slice, heads: slice) -> "Mask":
        """The mask of some of the batch's sequences and heads."""
        names = [name for name, value in vars(self).items() if isinstance(value, Tensor) and len(value) > 1]
        rule = None if self.rule is None else self.rule.part(batch, heads)
        some = replace(self, rule=rule, **{name: getattr(self, name)[batch] for name in names})
        dense, added = (one if one is None or one.shape[1] == 1 else one[:, heads] for one in (some.dense, some.added))
        return replace(some, dense=dense, added=added)

    def positions(self, queries: slice, keys: slice) -> tuple[Int[Tensor, "#batch some"], Int[Tensor, "#batch others"]]:
        assert self.query_positions is not None and self.key_positions is not None
        return self.query_positions[:, queries], self.key_positions[:, keys]

    def distance(self, queries: slice, keys: slice) -> Int[Tensor, "batch queries_here keys_here"]:
        """Query position minus key position."""
        query, key = self.positions(queries, keys)
        return query[:, :, None] - key[:, None]

    def block(self, queries: slice, keys: slice) -> Bool[Tensor, "batch heads queries_here keys_here"]:
        """Return the admitted pairs of one block; sizes of 1 broadcast."""
        distance = self.distance(queries, keys)
        admitted = torch.ones_like(distance, dtype=torch.bool)
        if self.lookback is not None:
            admitted = admitted & (distance <= self.lookback)
        if self.lookahead is not None:
            admitted = admitted & (distance >= -self.lookahead)
        if self.key_valid is not None:
            admitted = admitted & self.key_valid[:, None, keys]
        if self.query_segments is not None and self.key_segments is not None:
            admitted = admitted & (self.query_segments[:, queries, None] == self.key_segments[:, None, keys])
        admitted = admitted[:, None]
        admitted = admitted if self.rule is None else admitted & self.rule.block(queries, keys)
        return admitted if self.dense is None else admitted & self.dense[:, :, queries, keys]

    def first_keys(self) -> Int[Tensor, "batch queries"]:
        """The first token of each query: its sequence's first valid key, or its segment's; −1 where there is none."""
        if self.first is not None:
            return self.first
        assert self.query_positions is not None and self.key_positions is not None
        key_valid, segments = self.key_valid, self.key_segments
        num_keys = self.key_positions.shape[-1]
        if key_valid is None:
            key_valid = torch.ones(1, num_keys, dtype=torch.bool, device=self.key_positions.device)
        if segments is None or self.query_segments is None:
            first = key_valid.int().argmax(-1, keepdim=True).where(key_valid.any(-1, keepdim=True), -1)
            return first.expand(-1, self.query_positions.shape[-1])
        key_valid, segments = torch.broadcast_tensors(key_valid, segments)
        return first_of_segment(self.query_segments, segments, key_valid)


def first_of_segment(
    query_segments: Int[Tensor, "#batch queries"],
    segments: Int[Tensor, "batch keys"],
    valid: Bool[Tensor, "batch keys"],
) -> Int[Tensor, "batch queries"]:
    """The smallest valid index of each segment, looked up for every query: O(keys) memory, not O(queries · keys)."""
    query_segments = query_segments.expand(len(segments), -1)
    both = torch.cat([segments, query_segments], -1)
    numbers = torch.unique(both, return_inverse=True)[1]  # any labels become 0, 1, 2, …
    of_keys, of_queries = numbers.split([segments.shape[-1], query_segments.shape[-1]], -1)
    num_keys = segments.shape[-1]
    index = torch.arange(num_keys, device=segments.device).expand_as(segments).where(valid, num_keys)
    first = torch.full((len(segments), int(numbers.max()) + 1), num_keys, device=segments.device)
    first = first.scatter_reduce(-1, of_keys, index, "amin").gather(-1, of_queries)
    return first.where(first < num_keys, -1)
