"""Logit soft-capping: ω ↦ c·tanh(ω/c) (Gemma Team 2024, arXiv 2408.00118; after Bello et al. 2016)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ...attention.calls import AttentionCall
from ...errors import refusal
from ...models.live.explicit import Explicit
from ...models.live.watch import Sample
from ..base import Stabiliser
from ..live.find import find_pairs
from ..live.interception import Slots, check_no_full_graph


class SoftCap(Stabiliser):
    """No logit beyond ±cap. Cost: the logits are materialised, O(T²) memory, since no fused kernel on CPU caps."""

    def __init__(
        self, model: nn.Module, *, cap: float = 50.0, heads: Sequence[Explicit] = (), sample: Sample | None = None
    ) -> None:
        if not 0 < cap < float("inf"):
            raise refusal("a positive, finite cap", cap)
        check_no_full_graph(model)
        self.cap, self.slots = cap, Slots((), lambda name: Capping(cap))
        self.begin(model, partial(self._find, model, heads), sample, heads)

    def _find(self, model: nn.Module, heads: Sequence[Explicit], sample: Sample | None) -> None:
        pairs = find_pairs(model, heads=heads, sample=sample, trained=False, latent=True)
        self.slots = Slots(pairs, lambda name: Capping(self.cap))

    def detach(self) -> None:
        self.stop_waiting()
        self.slots.remove()


@dataclass(frozen=True, eq=False)
class Capping:
    """The handler of one module."""

    cap: float

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        if call.softcap is None:
            return call.changed(softcap=self.cap).attend()
        # The model caps already. Masks come behind the cap, which would make them finite.
        return call.finish(call.masked(torch.tanh(call.raw() / self.cap) * self.cap, as_given=True))
