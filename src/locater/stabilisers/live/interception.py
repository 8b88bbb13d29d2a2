"""A slot in anyone's attention: every call of `scaled_dot_product_attention` within a module goes to a handler.

The queries and keys seen there are the real ones, per head, norms and rotary positions included.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...errors import refusal
from .pairs import Pair


@dataclass(frozen=True)
class Call:
    """One call of scaled dot-product attention; keys may have fewer heads than queries."""

    query: Float[Tensor, "*batch heads queries d_head"]
    key: Float[Tensor, "*batch key_heads keys d_head"]
    value: Float[Tensor, "*batch key_heads keys d_value"]
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def changed(self, **parts: Any) -> "Call":
        return replace(self, **parts)

    def attend(self) -> Float[Tensor, "*batch heads queries d_value"]:
        """By torch's own kernel."""
        tensors = self.query, self.key, self.value, self.attn_mask
        options: Any = dict(scale=self.scale, enable_gqa=self.enable_gqa)
        return functional.scaled_dot_product_attention(*tensors, self.dropout_p, self.is_causal, **options)

    @property
    def temperature(self) -> float:
        """λ, the number that logits are divided by."""
        return self.query.shape[-1] ** 0.5 if self.scale is None else 1 / self.scale

    def raw(self, rows: slice = slice(None)) -> Float[Tensor, "*batch heads queries keys"]:
        """The logits of some of the queries before any mask, materialised; in at least float32."""
        return (self.query[..., rows, :] @ self._repeated(self.key).mT).float() / self.temperature

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


Handler = Callable[[str, Call], Tensor]


class Slots:
    """Handlers around the attention modules of the pairs, named by `name`; `remove()` leaves no trace."""

    def __init__(self, pairs: Iterable[Pair], handler: Handler) -> None:
        self.called: set[str] = set()
        self.names = {}
        self.undo: list[Callable[[], None]] = []
        for pair in pairs:
            module = pair.query.weight.attention
            if id(module) not in self.names:
                self.names[id(module)] = pair.name
                self._wrap(module, pair.name, handler)

    def remove(self) -> None:
        while self.undo:
            self.undo.pop()()

    def check(self, name: str) -> None:
        """Refuses a module whose attention does not pass through the slot: the stabiliser would do nothing."""
        if name not in self.called:
            remedy = "load the model with attn_implementation='sdpa', or call it with need_weights=False"
            raise refusal("attention through scaled_dot_product_attention", f"another way in {name}", remedy)

    def _wrap(self, module: nn.Module, name: str, handler: Handler) -> None:
        before, own = module.forward, "forward" in module.__dict__

        def handle(call: Call) -> Tensor:
            self.called.add(name)
            return handler(name, call)

        @torch.compiler.disable  # the compiler misses some kernels under a function mode, which would bypass the slot
        @functools.wraps(before)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Intercept(handle):
                found = before(*args, **kwargs)
            self.check(name)
            return found

        module.forward = forward  # type: ignore[method-assign]
        # A module with a hook is not bypassed by the fused encoder layer of torch.
        hook = module.register_forward_pre_hook(lambda *_: None)
        self.undo.append(lambda: setattr(module, "forward", before) if own else module.__dict__.pop("forward"))
        self.undo.append(hook.remove)


class _Intercept(TorchFunctionMode):
    """Hands calls of scaled dot-product attention over, wherever in the call tree they are."""

    def __init__(self, handle: Callable[[Call], Tensor]) -> None:
        super().__init__()
        self.handle = handle

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self.handle(Call(*args, **kwargs))
        if func is functional.multi_head_attention_forward:
            return self._inside(func, args, kwargs)
        return func(*args, **kwargs)

    def _inside(self, func, args, kwargs):
        """A mode does not reach into this function of torch, which looks its kernel up by name."""
        original = functional.scaled_dot_product_attention

        def handed_over(*call: Any, **options: Any) -> Tensor:
            functional.scaled_dot_product_attention = original
            try:
                return self.handle(Call(*call, **options))
            finally:
                functional.scaled_dot_product_attention = handed_over

        functional.scaled_dot_product_attention = handed_over
        try:
            return func(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = original
