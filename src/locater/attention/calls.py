"""Arguments of an attention kernel: final queries and keys, after every projection, norm, rotation and stabiliser."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import Refusal, refusal
from ..projections import widen
from .masks import admits

SDPA, WRITTEN_OUT = "scaled_dot_product_attention", "softmax"
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of an attention kernel: softmax(softcap(q·k · scale) + mask), and what it is applied to.

    Keys may have fewer heads than queries. `attn_mask` is True where a key is admitted, or is added. `is_causal` admits
    key ≤ query + `offset`, and `window` bounds how far back and ahead. `rule` and `score` are FlexAttention's. Where
    attention was written out, queries and keys are not known, and have no size: the logits are the mask that is added.
    A call with arguments that cannot be read is `unreadable`, for the reason given, and has no others.
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
    offset: int | Int[Tensor, "#texts #queries"] = 0  # or one of each query
    slopes: Float[Tensor, "..."] | None = None  # ALiBi's, in flash-attn: (heads,) or (texts, heads)
    segments: tuple[Tensor, Tensor] | None = None  # of packed queries and keys
    rule: Rule | None = None
    score: Callable[..., Tensor] | None = None
    key_valid: Bool[Tensor, "texts keys"] | None = None  # of a cache of keys: which of them are used
    through: str = SDPA
    tokens_first: bool = False  # whether the kernel's own arguments and output have heads behind tokens
    modules: tuple[nn.Module, ...] = ()  # whose methods were running, the innermost first
    x: Float[Tensor, "texts tokens d_model"] | None = None  # what the innermost one's forward was given
    lengths: tuple[int, ...] = ()  # of that and of the other sequences that came with it, texts or tokens
    unreadable: Refusal | None = None
    is_share: bool = False  # of the tokens of each text, the others being other processes'

    @property
    def logits(self) -> Float[Tensor, "*texts heads queries keys"] | None:
        """The input of a softmax that was written out; None for a kernel's call."""
        return self.attn_mask if self.through == WRITTEN_OUT else None

    @property
    def is_empty(self) -> bool:
        """Tell whether there is no query or no key, as in a batch without tokens: nothing to look at."""
        parts = (self.query, self.key) if self.logits is None else (self.logits,)
        return self.unreadable is None and any(part.numel() == 0 for part in parts)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Texts, heads, queries, keys, of a call with four dimensions."""
        texts, heads, queries, _ = self.query.shape
        return texts, heads, queries, self.key.shape[2]

    def changed(self, **parts: object) -> "AttentionCall":
        return replace(self, **parts)

    def attend(self) -> Float[Tensor, "*batch heads queries d_value"]:
        """By torch's own kernel; materialised where that has no soft-cap."""
        return attend(self)

    @property
    def scaling(self) -> float:
        """1/λ, the number that products of queries and keys are multiplied by; it may be 0."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    def raw(self, rows: slice = slice(None)) -> Float[Tensor, "*batch heads queries keys"]:
        """The logits of some of the queries before any mask, materialised; in at least float32."""
        if self.query.is_nested:
            raise refusal("texts of one length, or packed in one tensor", "nested tensors")
        # As kernels do: products of 16 bits are summed in 32, where float16 would overflow before the scale.
        with torch.autocast(self.query.device.type, enabled=False):
            logits = widen(self.query[..., rows, :]) @ self.repeated(widen(self.key)).mT * self.scaling
        logits = logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
        return logits if self.score is None else self.score(logits, *self._indices(rows)).to(logits)

    def admitted(self, rows: slice = slice(None)) -> Bool[Tensor, "..."]:
        """True where some of the queries may see a key, materialised; sizes of 1 broadcast."""
        hard, mask = self._hard(rows), self._mask(rows)
        return hard if mask is None else hard & admits(mask)

    def masked(
        self, logits: Float[Tensor, "*batch heads queries keys"], rows: slice = slice(None), *, as_given: bool = False
    ) -> Tensor:
        """Add the call's biases to the logits, and set −∞ where it masks.

        `as_given`: as the kernel does it, which does not know that −1e9 is meant to mask. The two differ for queries
        that a float mask forbids every key: there the kernel attends to all of them.
        """
        mask = self._mask(rows)
        if self.slopes is not None:
            slopes = self.slopes if self.slopes.dim() == 2 else self.slopes[None]
            logits = logits - slopes[:, :, None, None] * self.distance(rows).abs()
        if mask is not None and mask.is_floating_point():
            logits = logits + mask
            return logits.masked_fill(~(self._hard(rows) if as_given else self.admitted(rows)), -torch.inf)
        return logits.masked_fill(~self.admitted(rows), -torch.inf)

    def final(self, rows: slice = slice(None)) -> Float[Tensor, "*batch heads queries keys"]:
        """The logits as the softmax gets them, −∞ where masked; those of a written-out one may be spread (DTensor)."""
        if self.logits is None:
            return self.masked(self.raw(rows), rows)
        logits = widen(self.logits[..., rows, :])
        return logits.masked_fill(~admits(logits), -torch.inf)

    def _hard(self, rows: slice) -> Bool[Tensor, "..."]:
        """Compute the pairs admitted by everything but the mask of every pair."""
        distance, (back, ahead) = self.distance(rows), self.window
        admitted, ahead = torch.ones_like(distance, dtype=torch.bool), 0 if self.is_causal else ahead
        admitted = admitted if back is None else admitted & (distance <= back)
        admitted = admitted if ahead is None else admitted & (-distance <= ahead)
        if self.segments is not None:
            queries, keys = self.segments
            admitted = admitted & (queries[:, rows, None] == keys[:, None])[:, None]
        if self.key_valid is not None:
            admitted = admitted & self.key_valid[:, None, None]
        return admitted if self.rule is None else admitted & self.rule(*self._indices(rows))

    def _mask(self, rows: slice) -> Tensor | None:
        mask = self.attn_mask
        return mask if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., rows, :]

    def distance(self, rows: slice = slice(None)) -> Int[Tensor, "... queries keys"]:
        """Places from each query back to each key, to be broadcast against the logits."""
        queries, keys = (torch.arange(part.shape[-2], device=part.device) for part in (self.query, self.key))
        if isinstance(self.offset, int):
            return queries[rows, None] + self.offset - keys
        return (queries + self.offset)[:, None, rows, None] - keys

    def _indices(self, rows: slice) -> tuple[Tensor, ...]:
        """Text, head, query and key, to be broadcast against each other, as FlexAttention's functions take them."""
        sizes = *self.query.shape[:-1], self.key.shape[-2]
        texts, heads, queries, keys = (torch.arange(size, device=self.query.device) for size in sizes)
        return texts[:, None, None, None], heads[:, None, None], queries[rows, None], keys

    def finish(self, logits: Float[Tensor, "*batch heads queries keys"]) -> Tensor:
        """Softmax, dropout and the sum over values; queries without a key get 0, as from torch's kernel."""
        none = (logits == -torch.inf).all(-1, keepdim=True)  # filled before the softmax, whose gradient is NaN there
        weights = torch.softmax(logits.masked_fill(none, 0.0), -1).masked_fill(none, 0.0).to(self.value.dtype)
        weights = functional.dropout(weights, self.dropout_p) if self.dropout_p else weights
        return weights @ self.repeated(self.value)

    def repeated(self, tensor: Tensor) -> Tensor:
        """Keys or values, once for every query head."""
        times = self.query.shape[-3] // tensor.shape[-3]
        return tensor.repeat_interleave(times, -3) if times > 1 else tensor


def attend(call: AttentionCall) -> Float[Tensor, "*batch heads queries d_value"]:
    """The output of a call of scaled dot-product attention; interceptions further out see it, soft-cap and all."""
    tensors = call.query, call.key, call.value
    if call.softcap is None:
        options: Any = dict(scale=call.scale, enable_gqa=call.enable_gqa)
        mask, is_causal = call.attn_mask, call.is_causal
        if isinstance(call.offset, int) and call.offset:
            from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler along

            mask, is_causal = causal_lower_right(call.query.shape[-2], call.key.shape[-2]), False
        return functional.scaled_dot_product_attention(*tensors, mask, call.dropout_p, is_causal, **options)
    if has_torch_function(tensors):
        return handle_torch_function(attend, tensors, call)
    return call.finish(call.masked(call.raw(), as_given=True))  # masks come behind the cap, which makes them finite


def call_of_softmax(logits: Float[Tensor, "*texts heads queries keys"]) -> AttentionCall:
    """The call that an attention is which was written out: of its queries and keys only the numbers are known."""
    query, key = (logits.new_empty(*logits.shape[:-2], size, 0) for size in logits.shape[-2:])
    return AttentionCall(query, key, key, logits, scale=1.0, through=WRITTEN_OUT)


def in_backward() -> bool:
    """Tell whether this thread runs backward: a forward pass within it is recomputation, and was counted before."""
    return torch._C._current_graph_task_id() != -1
