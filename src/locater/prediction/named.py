"""Heads of a live module whose projections the user names: for attention that calls no kernel which would show it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from ..attention.calls import AttentionCall
from ..attention.interception import Interception
from ..errors import refusal
from ..models import AttentionModule, live
from ..models.live.explicit import Explicit

TAKEN = "heads that were named are taken without positions, norms or a window between projection and product"


def named(
    model: nn.Module, heads: Sequence[Explicit], causal: bool | None, run: Callable[[Sequence[AttentionModule]], object]
) -> list[AttentionModule]:
    """Their layers, as `causal` says; refused where `run`, a pass over these layers, calls a kernel that shows more."""
    if causal is None:
        raise refusal("causal=True or causal=False beside heads=…", "neither", "projections do not show the mask")
    layers = [_seeing(layer, 0 if causal else None) for layer in live.layers(model, heads=heads)]
    calls: list[AttentionCall] = []
    with Interception(calls.append):
        run(layers)
    if calls:
        remedy = "leave heads=… out: the call shows positions, norms and mask, which projections do not"
        raise refusal("attention that calls no kernel, for heads=…", f"a call of {calls[0].through}", remedy)
    return layers


def _seeing(layer: AttentionModule, lookahead: int | None) -> AttentionModule:
    return replace(layer, heads=tuple(replace(head, lookahead=lookahead) for head in layer.heads))
