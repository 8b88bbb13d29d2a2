"""The kernels whose calls can be seen, and the arguments of each read as an `AttentionCall`.

`scaled_dot_product_attention` and torch's operators behind it, FlexAttention, kernels of flash-attention's kind, what
`register_kernel` was told of, `attend`, and softmax where attention is written out. FlexAttention's block masks are a
function of four indices and a table of blocks that says where it need not be asked. Compiled, its kernel goes by the
blocks first; as written, by the function alone: where the two disagree, the model has two masks.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.nn import functional

from ..errors import refusal
from ..projections import widen
from .calls import AttentionCall, Rule, attend, call_of_softmax
from .flash import KNOWN, REMEDY, is_flash, pack, read_flash
from .masks import admits, read_given
from .registered import KERNELS

FUNCTION = functional.scaled_dot_product_attention  # torch replaces it in its module under context parallelism
SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
FUSED = ("aten::scaled_dot_product_", "aten::_scaled_dot_product_")
EFFICIENT = "aten::_efficient_attention_forward"
NAME = re.compile(r"attn|attention")
BACKWARD = re.compile(r"backward|bwd|combine|metadata|grad")
ABSENT, PARTIAL, FULL = range(3)
PROBES = (0.0, -100.0, 100.0)  # logits that are forbidden where a place is masked, whatever its logit


def read_call(func: Any, args: tuple, kwargs: dict[str, Any], *, written_out: bool) -> AttentionCall | None:
    """The call of a kernel, None where `func` is none; with `written_out` softmax over a last dimension is one too."""
    if func is FUNCTION or func is functional.scaled_dot_product_attention:
        return read_fused(*args, **kwargs)
    if func is attend:
        return args[0]
    if func in SOFTMAX:
        return _softmax(*args, **kwargs) if written_out else None
    if func is torch.ops.higher_order.flex_attention:
        return _flex(*args, **kwargs)
    kernel = KERNELS.get(func) or KERNELS.get(getattr(func, "overloadpacket", None))
    if kernel is not None:
        return kernel.call(args, kwargs)
    operator = _operator(func)
    return None if operator is None else operator.read(args, kwargs)


@dataclass(frozen=True)
class Operator:
    """An operator that is an attention kernel, or looks like one; its arguments in order, with their defaults."""

    name: str
    defaults: dict[str, Any]

    def read(self, args: tuple, kwargs: dict[str, Any]) -> AttentionCall:
        given = dict(zip(self.defaults, args, strict=False)) | kwargs
        if self.name.startswith(FUSED):
            return _behind_function(self.name, given)
        if self.name == EFFICIENT:
            return _efficient(given)
        if is_flash(self.name, self.defaults):
            through = "varlen_attn" if self.name.startswith("torch_attn::") else "flash_attn"
            return read_flash(given, self.defaults, through)
        names = ", ".join(self.defaults)
        raise refusal("a kernel that locater knows", f"the operator {self.name}({names})", REMEDY)


@lru_cache(maxsize=4096)
def _operator(func: Any) -> Operator | None:
    """The operator of a call, if it may be an attention kernel's forward."""
    schema = getattr(getattr(func, "default", func), "_schema", None)
    if schema is None or BACKWARD.search(schema.name) or schema.name == "aten::_fused_sdp_choice":
        return None
    defaults = {one.name: one.default_value if one.has_default_value() else None for one in schema.arguments}
    named = NAME.search(schema.name) and {"query", "key", "value"} <= {KNOWN.get(name) for name in defaults}
    is_one = schema.name.startswith(FUSED) or is_flash(schema.name, defaults) or named
    return Operator(schema.name, defaults) if is_one else None


def _softmax(input: Tensor, dim: int | None = None, *args: object, **kwargs: object) -> AttentionCall | None:
    return call_of_softmax(input) if dim in (-1, input.dim() - 1) and input.dim() >= 3 else None


def read_fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> AttentionCall:  # fmt: skip
    """torch's function; its mask is read here, whichever kind it is."""
    mask = read_given(attn_mask, is_causal=is_causal)
    return AttentionCall(
        query, key, value, mask.tensor, dropout_p, mask.is_causal, scale, enable_gqa, offset=mask.offset
    )


def _behind_function(name: str, given: dict[str, Any]) -> AttentionCall:
    """torch's operators behind its function, called by themselves."""
    mask = given.get("attn_mask", given.get("attn_bias"))
    same = {name: given[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa") if name in given}
    call = read_fused(given["query"], given["key"], given["value"], mask, **same)
    is_lower = name == "aten::_scaled_dot_product_flash_attention"  # as flash-attn has it, others as the function
    return call.changed(offset=call.key.shape[-2] - call.query.shape[-2]) if call.is_causal and is_lower else call


def _efficient(given: dict[str, Any]) -> AttentionCall:
    """xFormers' kernel as torch has it: tokens before heads, causality as a number, a mask that is added."""
    if given.get("cu_seqlens_q") is not None or given.get("seqlen_k") is not None or given.get("window_size"):
        raise refusal(f"{EFFICIENT} for texts of one length", "packed texts, or a window", REMEDY)
    query, key, value = (given[name].transpose(1, 2) for name in ("query", "key", "value"))
    kind = given.get("custom_mask_type") or 0
    call = read_fused(query, key, value, given.get("bias"), is_causal=kind > 0, scale=given.get("scale"))
    offset = key.shape[-2] - query.shape[-2] if kind == 2 else 0
    return call.changed(offset=offset, tokens_first=True, through="efficient_attention")


def _flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: tuple, scale: float, options: Any,
    score_buffers: tuple = (), mask_buffers: tuple = (),
) -> AttentionCall:  # fmt: skip
    """FlexAttention's operator; buffers are what its functions had closed over, where it was traced."""

    def score(*given: Tensor) -> Tensor:
        return score_mod(*given, *score_buffers)

    return AttentionCall(
        query, key, value, scale=scale, enable_gqa=query.shape[-3] != key.shape[-3], through="flex_attention",
        rule=read_rule(block_mask, mask_buffers, score, widen(query[:0]).dtype), score=score,
    )  # fmt: skip


def packed(call: AttentionCall) -> AttentionCall:
    """Texts of several lengths, as torch's jagged tensors hold them: one behind the other, each a segment."""
    if any(level.key() == TransformType.Vmap for level in get_interpreter_stack() or ()):
        raise refusal("a batch of texts outside of torch.vmap", "one that it has taken apart")
    if not call.query.is_nested:
        return call
    jagged: list[Any] = [call.query, call.key, call.value]
    if any(part.layout != torch.jagged or getattr(part, "_ragged_idx", 0) != 2 for part in jagged):
        raise refusal("nested tensors of the jagged layout, heads before tokens", "others")
    flat = [part.values()[None] for part in jagged]
    ends = [part.offsets() for part in jagged[:2]]
    if call.is_causal and not torch.equal(*ends):
        raise refusal("causal queries and keys of the same lengths", "nested tensors of others")
    segments, offset = pack(*ends, *(part.shape[-2] for part in flat[:2]))
    return call.changed(query=flat[0], key=flat[1], value=flat[2], segments=segments, offset=offset)


def read_rule(
    block_mask: tuple, buffers: tuple = (), score: Callable[..., Tensor] | None = None, dtype: torch.dtype | None = None
) -> Rule:
    """Read a block mask, as FlexAttention's operator is given it. `buffers` are what its function had closed over.

    `score`, the change of logits of that `dtype`, masks too: where it makes a forbidden number of any logit. The rule
    refuses to answer where its blocks say otherwise than its function.
    """
    mask_mod: Callable[..., Tensor] = block_mask[-1]
    table, (q_size, k_size) = _table(block_mask), block_mask[-3:-1]

    def rule(text: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        admitted = mask_mod(text, head, query, key, *buffers)
        if table is not None:
            blocks = table[text % len(table), head % table.shape[1], query // q_size, key // k_size]
            if bool(((blocks == ABSENT) & admitted | (blocks == FULL) & ~admitted).any()):
                remedy = "make it by create_block_mask, or give it the mask_mod that its blocks were made of"
                raise refusal("a block mask whose blocks and mask_mod admit the same", "one that admits others", remedy)
        return admitted if score is None else admitted & ~_hidden(score, dtype, text, head, query, key)

    return rule


def _hidden(score: Callable[..., Tensor], dtype: torch.dtype | None, *indices: Tensor) -> Tensor:
    """Find the places where a change of logits makes a number that masks of any logit."""
    hidden = torch.ones((), dtype=torch.bool, device=indices[0].device)
    for logit in PROBES:
        if bool(hidden.any()):
            hidden = hidden & ~admits(score(torch.tensor(logit, dtype=dtype, device=hidden.device), *indices))
    return hidden


def _table(block_mask: tuple) -> Int[Tensor, "batch heads query_blocks key_blocks"] | None:
    """Table of blocks left out, asked about, or admitted whole; None where one block is everything."""
    if not isinstance(block_mask[0], int):  # torch before 2.6 gives no lengths
        return None
    num_queries, num_keys, partial, partial_keys, full, full_keys = block_mask[:6]
    q_size, k_size = block_mask[-3:-1]
    if q_size > num_queries and k_size > num_keys and num_queries == 1:
        return None
    sizes = *partial.shape[:2], -(-num_queries // q_size), -(-num_keys // k_size)
    table = torch.full(sizes, ABSENT, dtype=torch.int8, device=partial.device)
    for kind, counts, keys in ((PARTIAL, partial, partial_keys), (FULL, full, full_keys)):
        if counts is not None:
            _mark(table, kind, counts, keys)
    return table


def _mark(table: Tensor, kind: int, counts: Tensor, keys: Tensor) -> None:
    """The first `counts` entries of each row of `keys` name its blocks; the others mean nothing."""
    there: Any = torch.arange(keys.shape[-1], device=keys.device) < counts[..., None]
    texts, heads, rows, entries = there.nonzero(as_tuple=True)
    table[texts, heads, rows, keys[texts, heads, rows, entries].long()] = kind
