"""A call's arguments with one dimension of texts and one of heads, however many the model gave its kernel."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import refusal
from ..projections import whole
from .calls import AttentionCall
from .masks import plain_mask


def num_heads_of(call: AttentionCall) -> int:
    """The heads of a call: what stands between texts and tokens. Where one dimension holds both, the module's input
    tells how many texts there are; refused where that leaves two readings.
    """
    if call.unreadable is not None:
        raise call.unreadable
    if call.query.dim() == 4:
        return call.query.shape[1]
    leading = torch.broadcast_shapes(call.query.shape[:-2], _repeated(call).shape[:-2])
    if len(leading) != 1:
        return math.prod(leading[1:])
    (number,), (num_queries, size), x = leading, call.query.shape[-2:], call.x
    if x is None or num_queries not in x.shape[:2]:
        raise refusal("a call with dimensions of its own for texts and heads", f"{tuple(call.query.shape)}")
    num_texts = x.shape[0] if x.shape[1] == num_queries else x.shape[1]
    folded, alone = number % num_texts == 0, number * size == x.shape[-1]
    if folded and not (alone and num_texts > 1):
        return number // num_texts
    if alone and not folded:
        return number
    shapes = f"{tuple(call.query.shape)} from {num_texts} texts"
    raise refusal("a call with dimensions of its own for texts and heads", shapes)


def read_arguments(call: AttentionCall, num_heads: int | None = None) -> AttentionCall:
    """The call outside of the graph, with one dimension of texts and one of heads.

    `num_heads` tells heads from texts where a call has them in one. Under autocast the kernel computes in its type, and
    so does this.
    """
    if call.unreadable is not None:
        raise call.unreadable
    query, key = (_as_computed(whole(part.detach())) for part in (call.query, _repeated(call)))
    leading = query.dim() - 2
    query, key = _broadcast(query, key)
    query, key = (_four(part, num_heads if part is query else None) for part in (query, key))
    if leading == 1 and num_heads is not None:
        key = key[:, 0].unflatten(0, (len(query), -1))
    mask = call.attn_mask
    if mask is not None:
        mask = plain_mask(mask)
        mask = mask[(None,) * (leading + 2 - mask.dim())]
        mask = mask.expand(*mask.shape[:-2], query.shape[2], key.shape[2])
        mask = _four_mask(mask, query.shape[:2], num_heads) if leading != 2 else mask
    return call.changed(query=query, key=key, value=key, attn_mask=mask, enable_gqa=True)


def _repeated(call: AttentionCall) -> Tensor:
    """The keys; with more dimensions than texts and heads, shared ones are spelled out."""
    query, key = call.query, call.key
    if query.dim() <= 4 or not call.enable_gqa:
        return key
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)


def _broadcast(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Leading dimensions as the kernel broadcasts them; a key head that all query heads share stays one."""
    if query.dim() == 4:
        texts = max(len(query), len(key))
        return query.expand(texts, -1, -1, -1), key.expand(texts, -1, -1, -1)
    leading = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    return query.expand(*leading, -1, -1), key.expand(*leading, -1, -1)


def _four(tensor: Tensor, num_heads: int | None) -> Tensor:
    if tensor.dim() == 2:
        return tensor[None, None]
    if tensor.dim() == 3:
        return tensor[:, None] if num_heads is None else tensor.unflatten(0, (-1, num_heads))
    return tensor.flatten(1, -3)


def _four_mask(mask: Tensor, sizes: Sequence[int], num_heads: int | None) -> Tensor:
    """A mask of a call that had another number of dimensions than four."""
    if mask.dim() <= 3:
        return _four(mask, num_heads if len(mask) > 1 else None)
    if set(mask.shape[1:-2]) == {1}:
        return mask.flatten(1, -3)
    inner = math.prod(mask.shape[1:-2])
    if inner != sizes[1]:
        raise refusal("a mask of every head, or of all alike", f"{tuple(mask.shape)}")
    return mask.flatten(1, -3)


def _as_computed(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    if tensor.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def is_share_of_tokens(part: Tensor) -> bool:
    """Tell whether a process has some of the tokens of each text: context parallelism."""
    return any(placement.is_shard(part.dim() - 2) for placement in getattr(part, "placements", ()))


def with_four_dimensions(call: AttentionCall) -> AttentionCall:
    """The same call with one dimension of texts and one of heads."""
    if call.unreadable is None and call.query.dim() == 4:
        return call
    return read_arguments(call, num_heads_of(call))
