"""The one reader of the masks that attention is given: torch's kinds of them, and which of their numbers mean "masked".

Every other module asks here, so that a mask means the same to the monitor, the stabilisers, the finder and the proof.
"""

import sys
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor, nn

from ..errors import refusal
from ..projections import whole

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

FORBIDDEN = -9_000.0  # this or less masks: the customary −10,000 with a bias or a logit on top, and all below
KINDS = "a mask that is a plain tensor, a Parameter, a DTensor or torch's CausalBias"


class Given(NamedTuple):
    """A mask argument: a tensor of every pair, or causality alone, which admits key ≤ query + offset."""

    tensor: Tensor | None
    is_causal: bool
    offset: int = 0


def read_given(mask: object, *, is_causal: bool = False) -> Given:
    """Read the mask argument of a kernel. The memory of other subclasses than torch's own may hold anything: refused.

    Parameters and sharded tensors stay what they are, as the kernel is given them; `plain` unwraps these.
    """
    if mask is None:
        return Given(None, is_causal)
    if _is_causal_bias(mask):
        is_square = mask.seq_len_q == mask.seq_len_kv or mask.variant.name == "UPPER_LEFT"
        return Given(None, True, 0 if is_square else mask.seq_len_kv - mask.seq_len_q)
    if not isinstance(mask, Tensor) or (type(mask) not in (Tensor, nn.Parameter) and not _is_sharded(mask)):
        raise refusal(KINDS, f"{type(mask).__module__}.{type(mask).__qualname__}")
    if mask.is_nested or mask.layout != torch.strided:
        raise refusal(KINDS, "a nested one" if mask.is_nested else f"one of layout {mask.layout}")
    return Given(mask, is_causal)


def plain(mask: Tensor) -> Shaped[Tensor, "..."]:
    """Return any readable mask as one plain tensor, outside of the graph; causality is spelled out."""
    given = read_given(mask)
    if _is_causal_bias(mask):
        return torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool).tril(given.offset)
    return whole(mask.detach())


# Importing these modules takes longer than all else of a scan. Who has an object of their classes has imported them.
def _is_causal_bias(mask: object) -> "TypeGuard[CausalBias]":
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _is_sharded(mask: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(mask, module.DTensor)


def admits(mask: Shaped[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """True where a mask lets a key be seen, or a final logit is that of such a key; NaN passes, to be reported.

    >>> admits(torch.tensor([0.0, -3.0, -1e4, -torch.inf])).tolist()
    [True, True, False, False]
    """
    return ~(mask <= FORBIDDEN) if mask.is_floating_point() else mask.bool()
