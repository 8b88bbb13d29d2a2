"""The statistics of an intercepted call: its arguments read as a mask.

The mask of a call is causality, window, packed texts, a rule, or a mask of every pair. Where a text begins is guessed
from what the mask shows, for the statistics of first tokens and distances. The guess never decides who is admitted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..quantities import NEAR
from .arguments import read_arguments
from .calls import AttentionCall
from .fold import cut
from .masks import Mask, Rule, admits, first_of_segment
from .statistics import Statistics
from .streaming import Bias, Blocks, Scores, stream

ROWS = 128  # queries that are looked at together
FEWEST = 16
PAIRS = 1 << 19  # of queries and keys of all heads that a rule is asked about together: it holds several such


@torch.no_grad()
def statistics_of_call(
    call: AttentionCall,
    *,
    num_heads: int | None = None,
    heads: Sequence[int] | None = None,
    sample: Int[Tensor, " chosen"] | None = None,
    query_valid: Bool[Tensor, "batch queries"] | None = None,
    near: int = NEAR,
    blocks: Blocks | None = None,
) -> Statistics:
    """Compute statistics of all heads or some, of all queries or a sample, exactly as the kernel was told to compute.

    Distances are between indices: of a causal mask, a query stands where its last key does; else queries and keys end
    together. The first token is the first key that any query of the text (or packed text) may see.
    """
    call = read_arguments(call, num_heads)
    with torch.autocast(call.query.device.type, enabled=False):
        mask = replace(mask_of_call(call, query_valid), query_valid=query_valid)
        query, key, sinks, slopes = call.query, call.key, call.sinks, call.slopes
        if heads is not None:
            ratio = query.shape[1] // key.shape[1]
            query, key = query[:, list(heads)], key[:, [head // ratio for head in heads]]
            mask = _select_heads(mask, heads)
            sinks, slopes = (None if part is None else part[..., list(heads)] for part in (sinks, slopes))
        if sample is not None:
            query, mask = query[:, :, sample], mask.at(sample)
        bias: Bias | None = None if slopes is None else _alibi(slopes)
        scores = Scores(call.scaling, call.softcap, bias, sinks)
        return stream(query, key, mask=mask, scores=scores, near=near, blocks=blocks)


def _alibi(slopes: Float[Tensor, "*#batch heads"]) -> Bias:
    slopes = slopes if slopes.dim() == 2 else slopes[None]
    return lambda distance: -slopes[:, :, None, None] * distance[:, None].abs()


def _select_heads(mask: Mask, heads: Sequence[int]) -> Mask:
    """Keep the mask of these heads."""
    chosen = list(heads)
    dense, added = (one if one is None or one.shape[1] == 1 else one[:, chosen] for one in (mask.dense, mask.added))
    rule = None if mask.rule is None else replace(mask.rule, heads=mask.rule.heads[chosen])
    return replace(mask, dense=dense, added=added, rule=rule)


def is_shifted(logits: Float[Tensor, "*batch queries keys"]) -> bool:
    """Tell whether each row's largest logit was subtracted before the softmax, so that it is unknown."""
    return bool((logits.detach().amax(-1) == 0).all())


def mask_of_call(call: AttentionCall, query_valid: Tensor | None = None) -> Mask:
    """Read who may see whom in a call of four dimensions; `query_valid` leaves queries out of the guess about texts."""
    num_texts, num_heads, num_queries, num_keys = call.shape
    device = call.query.device
    back, ahead = call.window
    mask = Mask(lookback=back, lookahead=0 if call.is_causal else ahead, key_valid=call.key_valid)
    if call.segments is not None:
        mask = replace(mask, query_segments=call.segments[0], key_segments=call.segments[1])
    offset, is_bounded = call.offset, (mask.lookback, mask.lookahead) != (None, None)
    seen: Seen | None = None
    if call.rule is not None:
        indices = (torch.arange(number, device=device) for number in (num_texts, num_heads, num_queries))
        rule = Rule(call.rule, *indices, score=call.score)
        step = max(FEWEST, min(ROWS, PAIRS // (num_texts * num_heads * num_keys)))
        seen = Seen.of(lambda rows: rule.block(rows, slice(0, num_keys)).any(1), call.shape, query_valid, step)
        mask = replace(mask, rule=rule)
    elif call.attn_mask is not None:
        dense = admits(call.attn_mask)
        if bool((dense == dense[:, :1]).all()):  # a written-out softmax has one of each head
            dense = dense[:, :1]
        seen = Seen.of(lambda rows: dense[:, :, rows].any(1), call.shape, query_valid)
        mask = _simplest(mask, dense) or replace(mask, dense=dense)
        if call.attn_mask.is_floating_point() and bool((dense & (call.attn_mask != 0)).any()):
            mask = replace(mask, added=call.attn_mask)
    if seen is not None:
        mask = replace(mask, begin=seen.begin, last=seen.last)
        mask = mask if call.segments is not None else replace(mask, first=seen.first())
    # Bounds are counted from where the kernel has its queries, which no guess may move.
    if not is_bounded and isinstance(offset, int):
        guess = num_keys - num_queries
        is_simple = mask.lookahead is not None
        offset = 0 if is_simple else guess if seen is None else seen.offset(guess)
    positions = torch.arange(num_queries, device=device)[None] + offset
    return replace(mask, query_positions=positions).counted(num_queries, num_keys, device)


def _simplest(mask: Mask, dense: Bool[Tensor, "#batch #heads queries keys"]) -> Mask | None:
    """Keep a dense mask that says no more than "these keys" or "these keys, looking back" as that: less to do."""
    if dense.shape[1] > 1:
        return None
    dense = dense[:, 0]
    keys = dense.any(1)
    if mask.key_valid is None and bool((dense == keys[:, None]).all()):
        return replace(mask, key_valid=keys)
    causal = torch.ones(dense.shape[1:], dtype=torch.bool, device=dense.device).tril()
    is_free = (mask.lookback, mask.lookahead, mask.key_valid) == (None, None, None)
    if is_free and dense.shape[1] == dense.shape[2] and bool((dense == (keys[:, None] & causal)).all()):
        return replace(mask, key_valid=keys, lookahead=0)
    return None


@dataclass(frozen=True, eq=False)
class Seen:
    """Facts about a call's texts, read from a mask of every pair in one pass over blocks of queries."""

    keys: Bool[Tensor, "batch keys"]  # seen by any query
    begin: Int[Tensor, "batch queries"]  # the first key that each query sees; behind all where it sees none
    last: Int[Tensor, "batch queries"]  # the last one; −1 where it sees none

    @classmethod
    def of(
        cls, block: Callable[[slice], Tensor], shape: Sequence[int], query_valid: Tensor | None, step: int = ROWS
    ) -> "Seen":
        """Look at `block(rows)`, keys that some head of these queries sees; `shape` is texts, heads, queries, keys."""
        num_texts, _, num_queries, num_keys = shape
        found: Seen | None = None
        for rows in cut(num_queries, step):
            seen = block(rows)
            if found is None:
                # All of it before the loop: small tensors that stay, made between large ones that go, leave the
                # allocator holes in which the next large ones do not fit, and memory grows with the number of blocks.
                span = torch.empty(2, num_texts, num_queries, dtype=torch.long, device=seen.device)
                found = cls(torch.zeros(num_texts, num_keys, dtype=torch.bool, device=seen.device), *span)
            seen = seen if query_valid is None else seen & query_valid[:, rows, None]
            some = seen.any(-1)
            found.keys.logical_or_(seen.any(1))
            found.begin[:, rows] = seen.int().argmax(-1).where(some, num_keys)
            found.last[:, rows] = (num_keys - 1 - seen.flip(-1).int().argmax(-1)).where(some, -1)
        assert found is not None, "calls without queries are not read"
        return found

    def first(self) -> Int[Tensor, "batch queries"]:
        """The first token of each query's text: texts are split where no query sees keys on both sides."""
        num_keys = self.keys.shape[-1]
        some = (self.last >= 0).long()
        across = torch.zeros(len(self.keys), num_keys + 2, dtype=torch.long, device=self.keys.device)
        across = across.scatter_add(-1, self.begin + 1, some).scatter_add(-1, self.last + 1, -some)
        segments = (across.cumsum(-1)[:, :num_keys] == 0).cumsum(-1)
        return first_of_segment(segments.gather(-1, self.last.clamp(min=0)), segments, self.keys)

    def offset(self, otherwise: int) -> int:
        """Position of the first query, if every query's last key is one further than that of the query before it."""
        ends = (self.last - torch.arange(self.last.shape[1], device=self.last.device))[self.last >= 0]
        is_causal = len(ends) > 0 and self.last.shape[1] > 1 and bool((ends == ends[0]).all())
        return int(ends[0]) if is_causal else otherwise
