"""What an attention kernel was given: final queries and keys, after every projection, norm, rotation and stabiliser."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

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


def in_backward() -> bool:
    """Whether this thread runs backward: what runs forward within it is recomputed, and was counted before."""
    return torch._C._current_graph_task_id() != -1
