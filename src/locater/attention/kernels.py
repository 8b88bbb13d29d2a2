"""The kernels whose calls can be seen, and the arguments of each read as an `AttentionCall`.

`scaled_dot_product_attention` and torch's operators behind it, FlexAttention, flash-attn's operators, torch's for
packed texts, `attend`, and softmax where attention is written out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import refusal
from .block_masks import read_rule
from .calls import AttentionCall, attend
from .mask_kinds import read_given

SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
FLASH = ("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward")
PACKED = "torch_attn::_varlen_attn"
TORCH = ("aten::scaled_dot_product_", "aten::_scaled_dot_product_")


def read_call(func: Any, args: tuple, kwargs: dict[str, Any], *, written_out: bool) -> AttentionCall | None:
    """The call of a kernel, None where `func` is none; with `written_out` softmax over a last dimension is one too."""
    if func is functional.scaled_dot_product_attention:
        return read_fused(*args, **kwargs)
    if func is attend:
        return args[0]
    if func in SOFTMAX:
        return _softmax(*args, **kwargs) if written_out else None
    if func is torch.ops.higher_order.flex_attention:
        return _flex(*args, **kwargs)
    name = _name(func)
    if name in FLASH:
        return _flash(_named(func, args, kwargs))
    if name == PACKED:
        return _packed(_named(func, args, kwargs))
    return _torch(_named(func, args, kwargs)) if name.startswith(TORCH) and "backward" not in name else None


def _name(func: object) -> str:
    schema = getattr(func, "_schema", None)
    return getattr(func, "_qualified_op_name", "") if schema is None else schema.name


def _named(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments by name."""
    overload = getattr(func, "default", func)
    return dict(zip([argument.name for argument in overload._schema.arguments], args, strict=False)) | kwargs


def _softmax(input: Tensor, dim: int | None = None, *args: object, **kwargs: object) -> AttentionCall | None:
    if dim not in (-1, input.dim() - 1) or input.dim() < 3:
        return None
    none = input.new_empty(0)
    return AttentionCall(none, none, none, logits=input, through="softmax")


def read_fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> AttentionCall:  # fmt: skip
    """torch's function; its mask is read here, whichever kind it is."""
    mask = read_given(attn_mask, is_causal=is_causal)
    return AttentionCall(
        query, key, value, mask.tensor, dropout_p, mask.is_causal, scale, enable_gqa, offset=mask.offset
    )


def _torch(given: dict[str, Any]) -> AttentionCall:
    """torch's operators behind its function, called by themselves."""
    mask = given.get("attn_mask", given.get("attn_bias"))
    same = {name: given[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa") if name in given}
    return read_fused(given["query"], given["key"], given["value"], mask, **same)


def _flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: tuple, scale: float, options: Any,
    score_buffers: tuple = (), mask_buffers: tuple = (),
) -> AttentionCall:  # fmt: skip
    """FlexAttention's operator; buffers are what its functions had closed over, where it was traced."""
    return AttentionCall(
        query, key, value, scale=scale, enable_gqa=query.shape[-3] != key.shape[-3], through="flex_attention",
        rule=read_rule(block_mask, mask_buffers),
        score=lambda *indices: score_mod(*indices, *score_buffers),
    )  # fmt: skip


def _flash(given: dict[str, Any]) -> AttentionCall:
    """flash-attn's operators: heads behind tokens; causal masks end with the last key; packed texts by their ends."""
    query, key, value = (given[name] for name in "qkv")
    segments = None
    if query.dim() == 3:
        query, key, value = query[None], key[None], value[None]
        segments = _segments(given["cu_seqlens_q"], given["cu_seqlens_k"], query, key, causal=given["causal"])
    return AttentionCall(
        *(part.transpose(1, 2) for part in (query, key, value)),
        is_causal=given["causal"],
        scale=given["softmax_scale"],
        softcap=given.get("softcap") or None,
        window=_window(given["window_size_left"], given["window_size_right"]),
        offset=key.shape[1] - query.shape[1],
        slopes=given.get("alibi_slopes"),
        segments=segments,
        through="flash_attn",
    )


def _packed(given: dict[str, Any]) -> AttentionCall:
    """torch's kernel for packed texts: as flash-attn's, with causality as a window that does not look ahead."""
    if given.get("block_table") is not None or given.get("seqused_k") is not None:
        raise refusal("packed texts whose keys are all given", "a cache of keys")
    query, key, value = (given[name][None] for name in ("query", "key", "value"))
    window = _window(*(given.get("window_size") or (-1, -1)))
    causal = bool(given.get("is_causal")) or window[1] == 0
    ends = given["cu_seq_q"], given["cu_seq_q"] if given.get("cu_seq_k") is None else given["cu_seq_k"]
    return AttentionCall(
        *(part.transpose(1, 2) for part in (query, key, value)),
        is_causal=causal,
        scale=given.get("scale"),
        window=window,
        offset=key.shape[1] - query.shape[1],
        segments=_segments(*ends, query, key, causal=causal or window != (None, None)),
        through="varlen_attn",
    )


def _window(left: int, right: int) -> tuple[int | None, int | None]:
    """How far back and ahead; below 0 there is no bound."""
    return None if left < 0 else left, None if right < 0 else right


def _segments(
    query_ends: Tensor, key_ends: Tensor, query: Tensor, key: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The number of the packed text that each query and each key belongs to."""
    if causal and not torch.equal(query_ends, key_ends):
        raise refusal("packed queries and keys of the same lengths", "others")
    return labels(query_ends, query.shape[1]), labels(key_ends, key.shape[1])


def labels(ends: Tensor, length: int) -> Tensor:
    """The number of the packed text that each token belongs to, from where texts begin, and the end of the last."""
    return torch.bucketize(torch.arange(length, device=ends.device), ends[1:], right=True)[None]


def packed(call: AttentionCall) -> AttentionCall:
    """Texts of several lengths, as torch's jagged tensors hold them: one behind the other, each a segment."""
    if not call.query.is_nested:
        return call
    jagged: list[Any] = [call.query, call.key, call.value]
    if any(part.layout != torch.jagged or getattr(part, "_ragged_idx", 0) != 2 for part in jagged):
        raise refusal("nested tensors of the jagged layout, tokens behind heads", "others")
    flat = [part.values()[None] for part in jagged]
    sides = (part.transpose(1, 2) for part in flat[:2])
    ends = (part.offsets() for part in jagged[:2])
    segments = _segments(*ends, *sides, causal=call.is_causal)
    return call.changed(query=flat[0], key=flat[1], value=flat[2], segments=segments)
