"""Kernels of flash-attention's kind, recognised by their names' endings and arguments, whichever package brings them.

flash-attn 2 (`flash_attn::_flash_attn_forward`), 3 (`flash_attn_3::fwd`), 4 (`flash_attn.cute.interface`), what the
package `kernels` loads under names of its own, torch's for packed texts and those behind its function. Tokens come
before heads; causality and windows are counted from where queries and keys end together.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..errors import refusal
from .calls import AttentionCall

ALIASES = {
    "query": ("q", "query"),
    "key": ("k", "key"),
    "value": ("v", "value"),
    "scale": ("softmax_scale", "scale"),
    "is_causal": ("causal", "is_causal"),
    "window": ("window_size",),
    "back": ("window_size_left",),
    "ahead": ("window_size_right",),
    "softcap": ("softcap", "logits_soft_cap"),
    "slopes": ("alibi_slopes",),
    "sinks": ("s_aux", "learnable_sink", "sinks"),
    "query_ends": ("cu_seqlens_q", "cu_seq_q", "cum_seq_q"),
    "key_ends": ("cu_seqlens_k", "cu_seqlens_kv", "cu_seq_k", "cum_seq_k"),
    "num_used": ("seqused_k", "cache_seqlens"),
    "pages": ("page_table", "block_table"),
}
KNOWN = {alias: name for name, aliases in ALIASES.items() for alias in aliases}
# Arguments that decide how fast an output is computed, where it is put, or what is computed besides.
HARMLESS = {
    "max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "min_seqlen_k", "out", "lse", "dropout_p", "p_dropout",
    "return_softmax", "return_softmax_lse", "return_lse", "return_debug_mask", "return_attn_probs", "zero_tensors",
    "num_splits", "pack_gqa", "sm_margin", "deterministic", "scheduler_metadata", "gen", "generator", "rng_state",
    "v_descale", "tile_mn", "mma_pv_is_rs", "num_threads", "intra_wg_overlap", "seqlen_k_per_split", "_arch",
    "disable_scheduler_metadata", "rotary_interleaved", "is_rotary_interleaved", "min_seqlen_q",
    "return_dropout_randval",
}  # fmt: skip
# Others may have the same arguments with heads before tokens: a name must end like one of these.
ENDING = re.compile(r"(::|_)(fwd|flash_attn_(varlen_)?(forward|fwd)|flash_attention_forward|varlen_attn)(_v\d+)?$")
OFF = (None, False, 0, -1)  # what an argument is that asks for nothing
REMEDY = "teach it by locater.monitor.register_kernel"


def is_flash(operator: str, names: Iterable[str]) -> bool:
    """True for the name and arguments of a forward kernel: queries, keys, values, a scale and causality.

    Some builds end the names of optional arguments with an underscore.
    """
    if not ENDING.search(operator):
        return False
    known = {KNOWN.get(name.rstrip("_")) for name in names}
    backward = any(name.startswith(("dout", "grad", "d_out")) for name in names)
    return {"query", "key", "value", "scale"} <= known and bool({"is_causal", "window"} & known) and not backward


def read_flash(arguments: Mapping[str, Any], defaults: Mapping[str, Any], through: str) -> AttentionCall:
    """Read a call by its arguments; one that is not known and asks for something is refused by its name."""
    arguments, defaults = ({name.rstrip("_"): value for name, value in one.items()} for one in (arguments, defaults))
    for name, value in arguments.items():
        if name not in KNOWN and name not in HARMLESS and not _is_off(value, defaults.get(name)):
            raise refusal(f"arguments of {through} that are known", f"`{name}`", REMEDY)
    given = {KNOWN[name]: value for name, value in arguments.items() if name in KNOWN and value is not None}
    query, key, value = given["query"], given["key"], given["value"]
    key_valid = segments = None
    if "pages" in given or "num_used" in given:
        key, value, key_valid, offset = _cached(given)
    elif "query_ends" in given:
        if query.dim() != 3 or key.dim() != 3:
            raise refusal("packed queries and packed keys", f"{query.dim()} and {key.dim()} dimensions", REMEDY)
        segments, offset = pack(given["query_ends"], given.get("key_ends", given["query_ends"]), len(query), len(key))
        query, key, value = query[None], key[None], value[None]
    else:
        offset = key.shape[1] - query.shape[1]
    window = given.get("window") or (given.get("back"), given.get("ahead"))
    back, ahead = (None if bound is None or bound < 0 else int(bound) for bound in window)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return AttentionCall(
        query,
        key,
        value,
        is_causal=bool(given.get("is_causal")),
        scale=given.get("scale"),
        softcap=given.get("softcap") or None,
        sinks=given.get("sinks"),
        window=(back, ahead),
        offset=offset,
        slopes=given.get("slopes"),
        segments=segments,
        key_valid=key_valid,
        tokens_first=True,
        through=through,
    )


def _is_off(value: object, default: object) -> bool:
    if isinstance(value, Tensor) or callable(value):
        return False
    return value == default or any(value is off or value == off for off in OFF)


def _cached(given: Mapping[str, Any]) -> tuple[Tensor, Tensor, Bool[Tensor, "texts keys"], Int[Tensor, "texts 1"]]:
    """Keys and values of a cache, in pages or not: which of them are used, and where the queries stand."""
    query, key, value, pages = given["query"], given["key"], given["value"], given.get("pages")
    if query.dim() != 4 or "query_ends" in given or "num_used" not in given:
        raise refusal("a cache of keys with its lengths, for texts of one length", "packed texts", REMEDY)
    if pages is not None:
        key, value = (part[pages.long()].flatten(1, 2) for part in (key, value))
    number = torch.as_tensor(given["num_used"], device=key.device).expand(len(query))[:, None].long()
    return key, value, torch.arange(key.shape[1], device=key.device) < number, number - query.shape[1]


def pack(
    query_ends: Int[Tensor, " ends"], key_ends: Int[Tensor, " ends"], num_queries: int, num_keys: int
) -> tuple[tuple[Tensor, Tensor], Int[Tensor, "1 queries"]]:
    """Number the packed text of each query and key, and where each query stands: a text's two sides end together.

    Tokens behind the last text belong to none.
    """
    queries, keys = labels(query_ends, num_queries), labels(key_ends, num_keys)
    text = queries.clamp(max=len(query_ends) - 2)
    ends = key_ends[text + 1] - query_ends[text + 1]
    last = len(query_ends) - 1
    return (queries.where(queries < last, -1), keys.where(keys < last, -2)), ends.long()


def labels(ends: Int[Tensor, " ends"], length: int) -> Int[Tensor, "1 tokens"]:
    """The number of the packed text that each token belongs to, from where texts begin, and the end of the last."""
    return torch.bucketize(torch.arange(length, device=ends.device), ends[1:].long(), right=True)[None]
