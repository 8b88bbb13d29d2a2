"""What an attention kernel was given: the one interception, of the call and not of the module or the process.

Queries and keys seen here are final, after every projection, norm, rotation and stabiliser, for any model. Seen are
`scaled_dot_product_attention`, FlexAttention, flash-attn's operators, `nn.MultiheadAttention`, `attend`, and softmax.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import refusal

SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)
FLASH = ("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward")
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an attention kernel: softmax(softcap(q·k · scale) + mask), and what it is applied to.

    Keys may have fewer heads than queries. `attn_mask` is True where a key is admitted, or is added. `is_causal` admits
    key ≤ query + `offset`, and `window` bounds how far back and ahead. `rule` and `score` are FlexAttention's. Where
    attention was written out (`through` is "softmax"), `logits` are the final ones, and queries and keys are not known.
    """

    query: Float[Tensor, "..."]  # (*texts, heads, queries, d_head)
    key: Float[Tensor, "..."]  # (*texts, key heads, keys, d_head)
    value: Float[Tensor, "..."]  # (*texts, key heads, keys, d_value)
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    softcap: float | None = None
    sinks: Float[Tensor, " heads"] | None = None
    window: tuple[int | None, int | None] = (None, None)
    offset: int = 0
    slopes: Float[Tensor, "..."] | None = None  # ALiBi's, in flash-attn: (heads,) or (texts, heads)
    segments: tuple[Tensor, Tensor] | None = None  # of packed queries and keys
    rule: Rule | None = None
    score: Callable[..., Tensor] | None = None
    logits: Float[Tensor, "..."] | None = None  # (*texts, heads, queries, keys)
    through: str = "scaled_dot_product_attention"
    modules: tuple[nn.Module, ...] = ()  # whose methods were running, the innermost first
    x: Float[Tensor, "texts tokens d_model"] | None = None  # what the innermost one's forward was given

    def changed(self, **parts: object) -> "AttentionCall":
        return replace(self, **parts)

    def attend(self) -> Float[Tensor, "*batch heads queries d_value"]:
        """By torch's own kernel; materialised where that has no soft-cap."""
        return attend(self)

    @property
    def temperature(self) -> float:
        """λ, the number that logits are divided by."""
        return self.query.shape[-1] ** 0.5 if self.scale is None else 1 / self.scale

    def raw(self, rows: slice = slice(None)) -> Float[Tensor, "*batch heads queries keys"]:
        """The logits of some of the queries before any mask, materialised; in at least float32."""
        logits = (self.query[..., rows, :] @ self._repeated(self.key).mT).float() / self.temperature
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def masked(self, logits: Float[Tensor, "*batch heads queries keys"], rows: slice = slice(None)) -> Tensor:
        """−∞ where the call masks, and what its mask adds otherwise."""
        if self.is_causal:
            shape = self.query.shape[-2], self.key.shape[-2]
            seen = torch.ones(shape, dtype=torch.bool, device=logits.device).tril()[rows]
            logits = logits.masked_fill(~seen, -torch.inf)
        if self.attn_mask is None:
            return logits
        mask = self.attn_mask if self.attn_mask.shape[-2] == 1 else self.attn_mask[..., rows, :]
        return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask

    def finish(self, logits: Float[Tensor, "*batch heads queries keys"]) -> Tensor:
        """Softmax, dropout and the sum over values; queries without a key get 0, as from torch's kernel."""
        weights = torch.softmax(logits, -1).nan_to_num(0.0).to(self.value.dtype)
        weights = functional.dropout(weights, self.dropout_p) if self.dropout_p else weights
        return weights @ self._repeated(self.value)

    def _repeated(self, tensor: Tensor) -> Tensor:
        times = self.query.shape[-3] // tensor.shape[-3]
        return tensor.repeat_interleave(times, -3) if times > 1 else tensor


def attend(call: AttentionCall) -> Float[Tensor, "*batch heads queries d_value"]:
    """The output of a call of scaled dot-product attention; interceptions further out see it, soft-cap and all."""
    tensors = call.query, call.key, call.value
    if call.softcap is None:
        options: Any = dict(scale=call.scale, enable_gqa=call.enable_gqa)
        kernel = functional.scaled_dot_product_attention
        return kernel(*tensors, call.attn_mask, call.dropout_p, call.is_causal, **options)
    if has_torch_function(tensors):
        return handle_torch_function(attend, tensors, call)
    return call.finish(call.masked(call.raw()))  # masks come behind the cap, which would make them finite


Handler = Callable[[AttentionCall], Tensor | None]


class Interception(TorchFunctionMode):
    """While it is entered, every attention of this thread goes to the handler: None lets it be, a tensor replaces it.

    Nothing outside the calls is touched, so there is nothing to put back. The handler runs outside of the mode. With
    `written_out` it is handed softmax over a last dimension too, which it must tell apart by module and shape.
    """

    def __init__(self, handle: Handler, *, written_out: bool = False) -> None:
        super().__init__()
        self.handle, self.written_out = handle, written_out

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        return self._hand_over(func, args, kwargs)

    def _hand_over(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = self._read(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        modules, x = callers()
        output = self.handle(replace(call, modules=modules, x=x))
        return func(*args, **kwargs) if output is None else output

    def _read(self, func: object, args: tuple, kwargs: dict[str, object]) -> AttentionCall | None:
        if func is functional.scaled_dot_product_attention:
            return AttentionCall(*args, **kwargs)
        if func is attend:
            return args[0]
        if self.written_out and func in SOFTMAX:
            return _softmax(*args, **kwargs)
        if func is torch.ops.higher_order.flex_attention:
            return _flex(*args, **kwargs)
        return _flash(func, args, kwargs) if _name(func) in FLASH else None

    def _multi_head(self, *args: object, **kwargs: object) -> Any:
        """torch's function with its kernel replaced in a copy: a mode does not reach into it by itself."""
        original = functional.multi_head_attention_forward
        names = {
            **original.__globals__,
            "has_torch_function": lambda tensors: False,
            "scaled_dot_product_attention": partial(self._by_name, functional.scaled_dot_product_attention),
            "softmax": partial(self._by_name, functional.softmax),
        }
        copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
        copy.__kwdefaults__ = original.__kwdefaults__
        return copy(*args, **kwargs)

    def _by_name(self, func: object, *args: object, **kwargs: object) -> Any:
        return self._hand_over(func, args, kwargs)


class Eagerly:
    """While it is entered, what torch has compiled runs as it was written: compiled code bypasses an interception.

    torch's stance is one for the process, so entries are counted: the first sets it, the last puts it back. Other
    threads lose only speed. Inside a compiled region, where a stance comes too late, a mode of this thread keeps the
    frames that follow from being compiled. What was compiled before stays, and is used again afterwards.
    """

    lock, number, stance = threading.Lock(), 0, None

    def __init__(self, *, within_compiled: bool = False) -> None:
        self.mode = _Uncompiled() if within_compiled else None

    def __enter__(self) -> "Eagerly":
        with Eagerly.lock:
            Eagerly.stance = Eagerly.stance or torch.compiler.set_stance("force_eager")
            Eagerly.number += 1
        if self.mode is not None:
            self.mode.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
        with Eagerly.lock:
            Eagerly.number -= 1
            if Eagerly.number == 0 and Eagerly.stance is not None:
                Eagerly.stance.__exit__(None, None, None)
                Eagerly.stance = None


class _Uncompiled(TorchDispatchMode):
    """Changes nothing; torch compiles no frame under a mode of this kind."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def callers() -> tuple[tuple[nn.Module, ...], Tensor | None]:
    """The modules whose methods are running in this thread, the innermost first, and what its forward was given.

    Read from the stack of calls, so that no module needs a hook for it; the input is None where it is not (texts,
    tokens, width), and is what the method calls so now, if it has given that name to something else.
    """
    found: list[nn.Module] = []
    x = None
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and not (found and owner is found[-1]):
            if not found and code.co_name == "forward" and code.co_argcount > 1:
                x = frame.f_locals.get(code.co_varnames[1])
            found.append(owner)
        frame = frame.f_back
    return tuple(found), x if isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point() else None


def in_compiled() -> bool:
    """Whether this thread is inside of what `torch.compile` gave: called from it, though not compiled itself."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper":
            return True
        frame = frame.f_back
    return False


def in_backward() -> bool:
    """Whether this thread runs backward: what runs forward within it is recomputed, and was counted before."""
    return torch._C._current_graph_task_id() != -1


def _softmax(input: Tensor, dim: int | None = None, *args: object, **kwargs: object) -> AttentionCall | None:
    if dim not in (-1, input.dim() - 1) or input.dim() < 3:
        return None
    none = input.new_empty(0)
    return AttentionCall(none, none, none, logits=input, through="softmax")


def _flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, block_mask: tuple, scale: float, options: Any,
    score_buffers: tuple = (), mask_buffers: tuple = (),
) -> AttentionCall:  # fmt: skip
    """FlexAttention's operator; buffers are what its functions had closed over, where it was traced."""
    mask_mod = block_mask[-1]
    return AttentionCall(
        query, key, value, scale=scale, enable_gqa=query.shape[-3] != key.shape[-3], through="flex_attention",
        rule=lambda *indices: mask_mod(*indices, *mask_buffers),
        score=lambda *indices: score_mod(*indices, *score_buffers),
    )  # fmt: skip


def _name(func: object) -> str:
    schema = getattr(func, "_schema", None)
    return getattr(func, "_qualified_op_name", "") if schema is None else schema.name


def _flash(func: Any, args: tuple, kwargs: dict[str, Any]) -> AttentionCall:
    """flash-attn's operators: heads behind tokens; causal masks end with the last key; packed texts by their ends."""
    overload = getattr(func, "default", func)
    names = [argument.name for argument in overload._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given[name] for name in "qkv")
    segments, batched = None, query.dim() == 4
    if not batched:
        query, key, value = query[None], key[None], value[None]
        ends = [given[f"cu_seqlens_{side}"] for side in "qk"]
        if given["causal"] and not torch.equal(*ends):
            raise refusal("packed queries and keys of the same lengths", "others")
        segments = _labels(ends[0], len(given["q"])), _labels(ends[1], len(given["k"]))
    left, right = (None if given[f"window_size_{side}"] < 0 else given[f"window_size_{side}"] for side in _SIDES)
    return AttentionCall(
        *(part.transpose(1, 2) for part in (query, key, value)),
        is_causal=given["causal"],
        scale=given["softmax_scale"],
        softcap=given.get("softcap") or None,
        window=(left, right),
        offset=key.shape[1] - query.shape[1],
        slopes=given.get("alibi_slopes"),
        segments=segments,
        through="flash_attn",
    )


_SIDES = ("left", "right")


def _labels(ends: Tensor, length: int) -> Tensor:
    """The number of the packed text that each token belongs to."""
    return torch.bucketize(torch.arange(length, device=ends.device), ends[1:], right=True)[None]
