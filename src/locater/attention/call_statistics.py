"""The statistics of an intercepted call: its arguments read as a mask, or its logits taken as they are."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..projections import widen
from .arguments import read
from .call_masks import ROWS, Seen, read_mask
from .calls import AttentionCall
from .mask_kinds import admits
from .masks import Mask
from .statistics import NEAR, Statistics, materialised
from .streaming import Bias, Blocks, stream


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
        bias: Bias | None = None if slopes is None else _alibi(slopes)
        options: dict[str, Any] = dict(bias=bias, sinks=sinks, near=near, blocks=blocks)
        return stream(query, key, mask=mask, scale=call.scaling, softcap=call.softcap, **options)


def _alibi(slopes: Float[Tensor, "*#batch heads"]) -> Bias:
    slopes = slopes if slopes.dim() == 2 else slopes[None]
    return lambda distance: -slopes[:, :, None, None] * distance[:, None].abs()


def _of_heads(mask: Mask, heads: Sequence[int]) -> Mask:
    chosen = list(heads)
    dense, added = (one if one is None or one.shape[1] == 1 else one[:, chosen] for one in (mask.dense, mask.added))
    rule = None if mask.rule is None else replace(mask.rule, heads=mask.rule.heads[chosen])
    return replace(mask, dense=dense, added=added, rule=rule)


def _written_out(
    logits: Float[Tensor, "batch heads queries keys"],
    heads: Sequence[int] | None,
    sample: Tensor | None,
    query_valid: Tensor | None,
    near: int,
) -> Statistics:
    """From the logits themselves, some queries at a time."""
    num_queries, num_keys = logits.shape[-2:]
    seen = Seen.of(lambda rows: admits(logits[:, :, rows]).any(1), logits.shape, query_valid)
    positions = torch.arange(num_queries, device=logits.device)[None] + seen.offset(num_keys - num_queries)
    first = seen.first()[:, None]
    rows = torch.arange(num_queries, device=logits.device) if sample is None else sample
    logits = logits if heads is None else logits[:, list(heads)]
    parts = []
    for some in rows.split(ROWS):
        part = widen(logits[:, :, some])
        admitted = admits(part)
        if query_valid is not None:
            admitted = admitted & query_valid[:, None, some, None]
        distance = positions[0, some, None] - torch.arange(num_keys, device=logits.device)
        parts.append(materialised(part, admitted, distance[None, None], near=near, sink=first[..., some]))
    names = [field.name for field in fields(Statistics)]
    return Statistics(**{name: torch.cat([getattr(part, name) for part in parts], -1) for name in names})


def is_shifted(logits: Float[Tensor, "batch heads queries keys"]) -> bool:
    """Tell whether each row's largest logit was subtracted before the softmax, so that it is unknown."""
    return bool((logits.detach().amax(-1) == 0).all())
