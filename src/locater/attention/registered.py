"""Kernels that someone told of, and Python functions that are kernels: those that no mode of torch can see.

flash-attn 4, Transformer Engine, and functions that were registered as attention in transformers.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import refusal
from .calls import AttentionCall
from .flash import REMEDY, is_flash, pack, read_flash

Reader = Callable[[dict[str, Any]], AttentionCall]
FORWARD = "_flash_attn_fwd"  # flash-attn 4's, in `flash_attn.cute.interface` or wherever `kernels` puts that
ENGINE = "DotProductAttention"  # Transformer Engine's module, and what calls of it are said to go through
INTERFACES = "ALL_ATTENTION_FUNCTIONS"  # of transformers, by the name of an implementation
POSITIONAL: tuple[str, ...] = (
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
)  # in which order transformers gives them
CHECKED = 8  # queries at each end of a text whose outputs are computed again


@dataclass(frozen=True)
class Kernel:
    """A function, the names of its arguments with their defaults, and how to read them."""

    name: str
    defaults: dict[str, Any]
    read: Reader
    is_last_resort: bool = False  # read only if nothing inside of it was seen

    def call(self, args: tuple, kwargs: dict[str, Any]) -> AttentionCall:
        return self.read(self.defaults | dict(zip(self.defaults, args, strict=False)) | kwargs)


KERNELS: dict[Any, Kernel] = {}


def register_kernel(kernel: Any, read: Reader) -> Any:
    """Teach the monitor and the stabilisers a kernel: `read` makes an `AttentionCall` of its arguments by name.

    For an operator (`torch.ops.mine.attention`) that is all. A Python function is seen when it is called through what
    is returned here, `attention = register_kernel(attention, read)`. Queries, keys and values of an `AttentionCall` are
    (texts, heads, tokens, size); set `tokens_first` where the output has heads behind tokens.
    """
    kernel = getattr(kernel, "_opoverload", kernel)  # of what `torch.library.custom_op` gives
    kernel = getattr(kernel, "overloadpacket", kernel)
    schema = getattr(getattr(kernel, "default", kernel), "_schema", None)
    if schema is not None:
        defaults = {one.name: one.default_value if one.has_default_value() else None for one in schema.arguments}
        KERNELS[kernel] = Kernel(schema.name, defaults, read)
        return kernel
    if not inspect.isfunction(kernel):
        raise refusal("an operator of torch.ops or a Python function", f"{type(kernel).__name__}")
    visible = _visible(kernel)
    KERNELS[visible] = Kernel(kernel.__qualname__, _defaults(kernel), read)
    return visible


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = [one for one in inspect.signature(function).parameters.values() if one.kind not in variable]
    return {one.name: None if one.default is inspect.Parameter.empty else one.default for one in parameters}


def _visible(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which the modes of torch are told."""

    @wraps(function)
    def visible(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(visible, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    return visible


# ------------------------------------------------------------------------------------------------- Transformer Engine
def read_transformer_engine(given: Mapping[str, Any]) -> AttentionCall:
    """Read a call of `DotProductAttention.forward`; `given["self"]` is the module."""
    module, kind = given["self"], (given.get("attn_mask_type") or given["self"].attn_mask_type).replace(",", "_")
    for name in ("inference_params", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        if given.get(name) is not None:
            raise refusal(f"arguments of {ENGINE} that are known", f"`{name}`", REMEDY)
    if getattr(module, "cp_group", None) is not None:
        raise refusal("whole texts on each process", "a context parallel group", REMEDY)
    layout = given.get("qkv_format") or module.qkv_format
    order = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3)}.get(layout)
    sides = [given[name] for name in ("query_layer", "key_layer", "value_layer")]
    query, key, value = [one.permute(order) for one in sides] if order else [one.transpose(0, 1)[None] for one in sides]
    scale, sinks = _engine_scale(module), getattr(module, "softmax_offset", None)
    call = AttentionCall(query, key, value, scale=scale, is_causal="causal" in kind, tokens_first=True, through=ENGINE)
    ends, from_start = key.shape[-2] - query.shape[-2], kind in ("causal", "padding_causal")
    back, ahead = (None if bound < 0 else bound for bound in given.get("window_size") or module.window_size or (-1, -1))
    sinks = None if sinks is None else sinks.flatten()
    call = call.changed(window=(back, ahead), offset=0 if from_start else ends, sinks=sinks)
    if layout == "thd":
        call = _engine_packed(call, given, from_start)
    elif "padding" in kind or kind == "arbitrary":
        call = _engine_masked(call, given, kind)
    return _engine_biased(call, given)


def _engine_scale(module: Any) -> float | None:
    names = ("flash_attention", "fused_attention", "unfused_attention")
    parts: list[Any] = [module, *(getattr(module, name, None) for name in names)]
    return next((one.softmax_scale for one in parts if hasattr(one, "softmax_scale")), None)


def _engine_packed(call: AttentionCall, given: Mapping[str, Any], from_start: bool) -> AttentionCall:
    ends: list[Any] = [given.get("cu_seqlens_q"), given.get("cu_seqlens_kv")]
    if any(one is None for one in ends):
        raise refusal("packed texts with cu_seqlens_q and cu_seqlens_kv", "others", REMEDY)
    if from_start and not torch.equal(*ends):
        raise refusal("causal queries and keys of the same lengths", "packed texts of others", REMEDY)
    segments, offset = pack(ends[0], ends[1], call.query.shape[-2], call.key.shape[-2])
    return call.changed(segments=segments, offset=offset)


def _engine_masked(call: AttentionCall, given: Mapping[str, Any], kind: str) -> AttentionCall:
    """True masks. A padding mask is of the tokens: one for both sides, or one for each."""
    mask = given.get("attention_mask")
    if kind == "arbitrary" and isinstance(mask, Tensor):
        return call.changed(attn_mask=~mask)
    if mask is None or (kind == "padding_causal_bottom_right" and call.query.shape[-2] != call.key.shape[-2]):
        raise refusal("a padding mask of queries and keys that end together", kind, REMEDY)
    keys = mask[1] if isinstance(mask, tuple) else mask
    return call.changed(key_valid=~keys.flatten(1))


def _engine_biased(call: AttentionCall, given: Mapping[str, Any]) -> AttentionCall:
    kind: str = given.get("core_attention_bias_type", "no_bias")
    bias: Any = given.get("core_attention_bias")
    if kind == "alibi" and given.get("alibi_slopes") is not None and call.is_causal:
        return call.changed(slopes=given["alibi_slopes"])
    if kind in ("pre_scale_bias", "post_scale_bias") and call.attn_mask is None:
        return call.changed(attn_mask=bias * call.scaling if kind == "pre_scale_bias" else bias)
    if kind != "no_bias":
        raise refusal(f"biases of {ENGINE} that are known", f"`{kind}`", REMEDY)
    return call


# ------------------------------------------------------------------------------------------------------- transformers
def read_interface(given: Mapping[str, Any]) -> AttentionCall:
    """Read a call of one of transformers' `ALL_ATTENTION_FUNCTIONS`, whose arguments have names of their own.

    What it does with others, or with a mask that it was not given, `check_output` must tell.
    """
    module, mask = given["module"], given.get("attention_mask")
    is_causal = given.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    ends, back = key.shape[-2] - query.shape[-2], given.get("sliding_window")
    is_whole = isinstance(mask, Tensor) and mask.dim() == 4
    if mask is not None and not is_whole and not (isinstance(mask, Tensor) and mask.dim() == 2):
        raise refusal("a mask of every pair, or of every key", type(mask).__name__, REMEDY)
    return AttentionCall(
        query, key, value, mask if is_whole else None, given.get("dropout") or 0.0,
        is_causal and not is_whole, given.get("scaling"),
        softcap=given.get("softcap"), sinks=given.get("s_aux"), offset=ends, tokens_first=True,
        window=(None if back is None or is_whole else back - 1, None),
        key_valid=mask.bool() if mask is not None and not is_whole else None,
    )  # fmt: skip


def check_output(call: AttentionCall, output: object) -> AttentionCall:
    """Hold a call that was read by the names of its arguments against some of the outputs, which it must give."""
    output = output[0] if isinstance(output, tuple) and output else output
    num_queries = call.query.shape[-2]
    exactness = 1e-3 if call.value.dtype in (torch.float32, torch.float64) else 2e-2
    for rows in (slice(0, CHECKED), slice(max(0, num_queries - CHECKED), num_queries)):
        logits = call.final(rows)
        if call.sinks is not None:
            logits = torch.cat([logits, call.sinks.to(logits)[:, None, None].expand(*logits.shape[:-1], 1)], -1)
        weights = logits.softmax(-1)[..., : call.key.shape[-2]].nan_to_num(0.0)
        expected = weights @ call.repeated(call.value).to(weights)
        found = output.transpose(1, 2)[..., rows, :] if isinstance(output, Tensor) and output.dim() == 4 else None
        size = expected.abs().amax().clamp(min=1e-6)
        if found is None or found.shape != expected.shape or bool((found - expected).abs().amax() > exactness * size):
            raise refusal("an attention function whose output its arguments tell", f"another in {call.through}", REMEDY)
    return call


class Functions:
    """While it is entered, kernels that are Python functions are visible, in every module that has one.

    These are flash-attn 4's forward functions and Transformer Engine's attention, and as the last resort whatever was
    registered as an attention function of transformers. Entries are counted: the first puts wrappers in their places,
    the last takes them out.
    """

    lock, number = threading.Lock(), 0
    replaced: list[tuple[Callable[[Any], None], Callable[..., Any], Callable[..., Any]]] = []

    def __enter__(self) -> "Functions":
        with Functions.lock:
            Functions.number += 1
            if Functions.number == 1:
                for module in [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]:
                    self._replace_in(vars(module))
        return self

    def _replace_in(self, names: dict[str, Any]) -> None:
        if not (FORWARD in names or ENGINE in names or INTERFACES in names):
            return  # at once: there are thousands of modules, and this runs before every pass
        function, engine, registry = (names.get(name) for name in (FORWARD, ENGINE, INTERFACES))
        if inspect.isfunction(function) and is_flash(FORWARD, defaults := _defaults(function)):
            put = partial(names.__setitem__, FORWARD)
            self._replace(put, function, lambda given: read_flash(given, defaults, "flash_attn"))
        forward = vars(engine).get("forward") if isinstance(engine, type) else None
        if inspect.isfunction(forward) and "query_layer" in _defaults(forward) and forward not in KERNELS:
            self._replace(partial(setattr, engine, "forward"), forward, read_transformer_engine)
        for mapping in (getattr(registry, "_global_mapping", {}), getattr(registry, "_local_mapping", {})):
            for name, one in list(mapping.items()):
                is_theirs = inspect.isfunction(one) and one.__module__.partition(".")[0] != "transformers"
                if is_theirs and one not in KERNELS:
                    self._replace(partial(mapping.__setitem__, name), one, read_interface, is_last_resort=True)

    def _replace(
        self, put: Callable[[Any], None], function: Callable[..., Any], read: Reader, *, is_last_resort: bool = False
    ) -> None:
        visible = _visible(function)
        put(visible)
        defaults: dict[str, Any] = dict.fromkeys(POSITIONAL) if is_last_resort else _defaults(function)
        KERNELS[visible] = Kernel(function.__name__, defaults, read, is_last_resort)
        Functions.replaced.append((put, function, visible))

    def __exit__(self, *reason: object) -> None:
        with Functions.lock:
            Functions.number -= 1
            while Functions.number == 0 and Functions.replaced:
                put, function, visible = Functions.replaced.pop()
                KERNELS.pop(visible, None)
                put(function)
