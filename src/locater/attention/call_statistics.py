"""The statistics of an intercepted call: its arguments read as a mask, or its logits taken as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..projections import widen
from .arguments import Arguments, read
from .calls import AttentionCall
from .masks import Mask, Rule
from .statistics import NEAR, Statistics, materialised
from .streaming import Bias, Blocks, stream

# A float mask that adds this or less admits nothing: the customary −10,000 and all that lie below.
FORBIDDEN = -9_999.0
ROWS = 128  # queries whose probabilities exist at a time, where logits were written out


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
    """Of all heads or some, of all queries or a sample, exactly as the kernel was told to compute.

    Distances are between indices: of a causal mask, a query stands where its last key does; else queries and keys end
    together. The first token is the first key that any query of the text (or packed text) may see.
    """
    given = read(call, num_heads)
    with torch.autocast(given.query.device.type, enabled=False):
        if given.logits is not None:
            return _written_out(given.logits, heads, sample, query_valid, near)
        mask = replace(read_mask(call, given, query_valid), query_valid=query_valid)
        query, key, sinks, slopes = given.query, given.key, call.sinks, call.slopes
        if heads is not None:
            ratio = query.shape[1] // key.shape[1]
            query, key = query[:, list(heads)], key[:, [head // ratio for head in heads]]
            mask = _of_heads(mask, heads)
            sinks, slopes = (None if part is None else part[..., list(heads)] for part in (sinks, slopes))
        if sample is not None:
            query, mask = query[:, :, sample], mask.at(sample)
        scale = given.query.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
        bias: Bias | None = None if slopes is None else _alibi(slopes)
        options: dict[str, Any] = dict(bias=bias, sinks=sinks, near=near, blocks=blocks)
        return stream(query, key, mask=mask, scale=scale, softcap=call.softcap, **options)


def _alibi(slopes: Float[Tensor, "*#batch heads"]) -> Bias:
    slopes = slopes if slopes.dim() == 2 else slopes[None]
    return lambda distance: -slopes[:, :, None, None] * distance[:, None].abs()


def _of_heads(mask: Mask, heads: Sequence[int]) -> Mask:
    chosen = list(heads)
    dense, added = (one if one is None or one.shape[1] == 1 else one[:, chosen] for one in (mask.dense, mask.added))
    rule = None if mask.rule is None else replace(mask.rule, heads=mask.rule.heads[chosen])
    return replace(mask, dense=dense, added=added, rule=rule)


def read_mask(call: AttentionCall, given: Arguments, query_valid: Tensor | None) -> Mask:
    """What the call says of who may see whom: causality, window, packed texts, a rule, or a mask of every pair."""
    num_texts, num_heads, num_queries, num_keys = given.shape
    device = given.query.device
    back, ahead = call.window
    mask = Mask(lookback=back, lookahead=0 if call.is_causal else ahead)
    offset = call.offset if call.is_causal or back is not None or ahead is not None else num_keys - num_queries
    if call.segments is not None:
        mask = replace(mask, query_segments=call.segments[0], key_segments=call.segments[1])
    if call.rule is not None:
        indices = (torch.arange(number, device=device) for number in (num_texts, num_heads, num_queries))
        rule = Rule(call.rule, *indices, score=call.score)
        seen = Seen.of(lambda rows: rule.block(rows, slice(0, num_keys)).any(1), num_queries, query_valid)
        mask, offset = seen.texts(replace(mask, rule=rule)), seen.offset(offset)
    elif given.mask is not None:
        dense = given.mask if given.mask.dtype == torch.bool else given.mask > FORBIDDEN
        seen = Seen.of(lambda rows: dense[:, :, rows].any(1), num_queries, query_valid)
        mask = _simplest(mask, dense) or seen.texts(replace(mask, dense=dense))
        offset = offset if call.is_causal else seen.offset(offset)
        if given.mask.dtype != torch.bool and bool((dense & (given.mask != 0)).any()):
            mask = replace(mask, added=given.mask)
    positions = torch.arange(num_queries, device=device)[None] + offset
    return replace(mask, query_positions=positions).counted(num_queries, num_keys, device)


def _simplest(mask: Mask, dense: Bool[Tensor, "#batch #heads queries keys"]) -> Mask | None:
    """A dense mask that says no more than "these keys" or "these keys, looking back" is kept as that: less to do."""
    if dense.shape[1] > 1:
        return None
    dense = dense[:, 0]
    keys = dense.any(1)
    if bool((dense == keys[:, None]).all()):
        return replace(mask, key_valid=keys)
    causal = torch.ones(dense.shape[1:], dtype=torch.bool, device=dense.device).tril()
    if dense.shape[1] == dense.shape[2] and bool((dense == (keys[:, None] & causal)).all()):
        return replace(mask, key_valid=keys, lookahead=0)
    return None


@dataclass(frozen=True, eq=False)
class Seen:
    """What a mask of every pair shows of its texts, in one pass over blocks of queries."""

    keys: Bool[Tensor, "batch keys"]  # seen by any query
    together: Bool[Tensor, "batch pairs"]  # a key and the one before it, by one query
    last: Int[Tensor, "batch queries"]  # the last key that each query sees
    some: Bool[Tensor, "batch queries"]  # whether there is any

    @classmethod
    def of(cls, block: Callable[[slice], Tensor], num_queries: int, query_valid: Tensor | None) -> "Seen":
        parts = []
        for start in range(0, num_queries, ROWS):
            rows = slice(start, min(start + ROWS, num_queries))
            seen = block(rows)
            seen = seen if query_valid is None else seen & query_valid[:, rows, None]
            last = seen.shape[-1] - 1 - seen.flip(-1).int().argmax(-1)
            parts.append((seen.any(1), (seen[..., 1:] & seen[..., :-1]).any(1), last, seen.any(-1)))
        keys, together, last, some = zip(*parts, strict=True)
        return cls(torch.stack(keys).any(0), torch.stack(together).any(0), torch.cat(last, 1), torch.cat(some, 1))

    def texts(self, mask: Mask) -> Mask:
        """Packed texts, told by the mask itself: neighbouring keys that no query sees both of belong to two texts."""
        if not bool((~self.together & self.keys[:, 1:] & self.keys[:, :-1]).any()):
            return replace(mask, key_valid=self.keys)
        segments = torch.nn.functional.pad(~self.together, (1, 0)).cumsum(-1)
        return replace(mask, key_valid=self.keys, key_segments=segments, query_segments=segments.gather(-1, self.last))

    def offset(self, otherwise: int) -> int:
        """Where the first query stands, if every query's last key is one further than that of the query before it."""
        ends = (self.last - torch.arange(self.last.shape[1], device=self.last.device))[self.some]
        is_causal = len(ends) > 0 and self.last.shape[1] > 1 and bool((ends == ends[0]).all())
        return int(ends[0]) if is_causal else otherwise


def _written_out(
    logits: Float[Tensor, "batch heads queries keys"],
    heads: Sequence[int] | None,
    sample: Tensor | None,
    query_valid: Tensor | None,
    near: int,
) -> Statistics:
    """From the logits themselves, some queries at a time."""
    num_queries, num_keys = logits.shape[-2:]
    seen = Seen.of(lambda rows: _admitted(logits[:, :, rows]).any(1), num_queries, query_valid)
    positions = torch.arange(num_queries, device=logits.device)[None] + seen.offset(num_keys - num_queries)
    mask = seen.texts(Mask(query_positions=positions)).counted(num_queries, num_keys, logits.device)
    first = mask.first_keys()[:, None]
    rows = torch.arange(num_queries, device=logits.device) if sample is None else sample
    logits = logits if heads is None else logits[:, list(heads)]
    parts = []
    for some in rows.split(ROWS):
        part = widen(logits[:, :, some])
        admitted = _admitted(part)
        if query_valid is not None:
            admitted = admitted & query_valid[:, None, some, None]
        distance = positions[0, some, None] - torch.arange(num_keys, device=logits.device)
        parts.append(materialised(part, admitted, distance[None, None], near=near, sink=first[..., some]))
    names = [field.name for field in fields(Statistics)]
    return Statistics(**{name: torch.cat([getattr(part, name) for part in parts], -1) for name in names})


def is_shifted(logits: Float[Tensor, "batch heads queries keys"]) -> bool:
    """Whether each row's largest was taken off before the softmax, so that the largest logit cannot be told."""
    return bool((logits.detach().amax(-1) == 0).all())


def _admitted(logits: Tensor) -> Tensor:
    """A key that lies far below all others, or below any real logit, was masked; NaN is kept, to be reported."""
    top = logits.nan_to_num(0.0, posinf=0.0, neginf=torch.finfo(logits.dtype).min).amax(-1, keepdim=True)
    return ~(logits <= top.clamp(max=0) + 0.9 * FORBIDDEN)
