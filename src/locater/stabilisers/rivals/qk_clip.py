"""QK-Clip: weights of a head rescaled after a step in which its logits grew too large.

Kimi Team 2025, "Kimi K2", arXiv 2507.20534: for latent attention as there, and for keys of their own or shared.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from ...attention.arguments import with_four_dimensions
from ...attention.calls import AttentionCall, in_backward
from ...errors import refusal
from ...models.live import at_work
from ...models.live.explicit import Explicit
from ...models.live.watch import Sample
from ...models.live.write_check import WriteCheck
from ...records import State, head_key, layer_key
from ..live.bounded import Bounds
from ..live.find import find_pairs
from ..live.looking import Looker
from ..live.maxima import Maxima
from ..live.pairs import Pair, check_stored

BLOCK = 128  # queries whose logits exist at a time


class QKClip(Looker):
    """γ = threshold / max logit where that exceeds it: W_Q and W_K by √γ; with shared keys W_Q alone by γ.

    Biases are scaled alike, so every logit shrinks by γ exactly. `step()` uses the largest logit since the last one,
    over all processes of `group`: replicas, shards of heads, stages of a pipeline. Cost: the logits of each training
    pass once more, in blocks; of every `every`-th step's passes only, if that is more than 1. `log_only` measures and
    changes nothing.

    `by="weights"` goes by the bound on each head's logits that its weights give behind the norm before attention, and
    needs no pass. No input reaches that bound in practice: logits stay far below a threshold that is held by it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        threshold: float = 100.0,
        by: Literal["logits", "weights"] = "logits",
        every: int = 1,
        log_only: bool = False,
        heads: Sequence[Explicit] = (),
        sample: Sample | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 < threshold < float("inf"):
            raise refusal("a positive, finite threshold", threshold)
        if every < 1:
            raise refusal("`every` of at least 1", every)
        if by not in ("logits", "weights"):
            raise refusal('by="logits" or by="weights"', by)
        self.threshold, self.every, self.log_only, self.group = threshold, every, log_only, group
        self.num_steps = 0
        self.by, self.bounds = by, None
        self.pairs: list[Pair] = []
        self.largest: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.begin(model, partial(self._find, model, heads), sample, heads)

    def _find(self, model: nn.Module, heads: Sequence[Explicit], sample: Sample | None) -> None:
        acts = not self.log_only
        self.pairs = find_pairs(model, heads=heads, sample=sample, trained=acts, latent=True, by_scale=acts)
        if acts:
            check_stored(self.pairs, "clip", "merge the adapter first, or give log_only=True")
        sides = [rows for pair in self.pairs for rows in pair.sides if not self.log_only]
        written = [one for rows in sides for one in (rows.weight.read(), rows.bias) if one is not None]
        self.writes = WriteCheck(written, None, "hold logits by LocAteR's penalty() in the loss")
        self.maxima = Maxima(self.pairs, self.group)
        if self.by == "weights":
            self.bounds = Bounds(model, self.pairs, heads=heads, sample=sample)
        else:
            self.look(model, self.pairs)
        if not self.log_only:
            at_work.begin(model, self)

    def is_due(self) -> bool:
        return self.num_steps % self.every == 0

    def attend(self, name: str, call: AttentionCall) -> None:
        known = self.largest.get(name)
        if call.is_empty or (known is not None and in_backward()):
            return  # nothing to see, or recomputed and seen before
        largest = largest_logits(call)
        self.largest[name] = largest if known is None else torch.maximum(known, largest)

    @torch.no_grad()
    def step(self) -> None:
        self.check_found("a step")
        self.writes.check()
        if self.is_due():
            self._clip()
        self.num_steps += 1

    def _clip(self) -> None:
        if self.bounds is None and not self.largest:
            self.warn_of_nothing()
        self.last = self.maxima.reduce(self.largest) if self.bounds is None else self.bounds.read()
        self.largest = {}
        for pair in self.pairs if not self.log_only else ():
            if pair.name in self.last:
                pair.clip(clip_factors(self._of(pair), self.threshold))

    def state_dict(self) -> State:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: State) -> None:
        self.num_steps = state.get("num_steps", 0)

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        """`qk/layer_03/max_logit` at the last step, and with `heads` each head's; `logit_bound` by weights."""
        label = "max_logit" if self.bounds is None else "logit_bound"
        several = len({pair.block for pair in self.pairs}) > 1
        found: dict[str, float] = {}
        for pair in (pair for pair in self.pairs if pair.name in self.last):
            key = layer_key(pair.layer, block=pair.block if several else "")
            values = self._of(pair).flatten().tolist()
            found[f"qk/{key}/{label}"] = max(found.get(f"qk/{key}/{label}", -math.inf), *values)
            for number, value in enumerate(values if heads else ()):
                found[f"qk/{key}/{head_key(pair.first + number)}/{label}"] = value
        return found

    def _of(self, pair: Pair) -> Float[Tensor, "groups heads"]:
        """The pair's heads among all of its module."""
        seen = len(self.last[pair.name])
        if seen < pair.first + math.prod(pair.shape):
            remedy = "clip before the heads are spread (tensor parallelism)"
            raise refusal(f"the logits of {math.prod(pair.shape)} heads in {pair.name}", f"those of {seen}", remedy)
        return self.last[pair.name][pair.first : pair.first + math.prod(pair.shape)].view(pair.shape)

    def detach(self) -> None:
        self.stop_waiting()
        at_work.end(self)
        if self.pairs:
            self.writes.close()
            super().detach()


def clip_factors(largest: Float[Tensor, "*heads"], threshold: float) -> Float[Tensor, "*heads"]:
    """threshold / largest where that exceeds it, else 1: all logits of a head may be negative, or not finite.

    >>> clip_factors(torch.tensor([200.0, 20.0, 0.0, -17.0, math.inf, math.nan]), 100.0)
    tensor([0.5000, 1.0000, 1.0000, 1.0000, 1.0000, 1.0000])
    """
    exceeds = (largest > threshold) & largest.isfinite()
    return torch.where(exceeds, threshold / largest, torch.ones_like(largest))


@torch.no_grad()
def largest_logits(call: AttentionCall) -> Float[Tensor, " heads"]:
    """max over batch, queries and admissible keys, block by block: no T×T matrix."""
    call = with_four_dimensions(call)
    num_queries = (call.query if call.logits is None else call.logits).shape[-2]
    rows = [slice(start, start + BLOCK) for start in range(0, num_queries, BLOCK)]
    blocks = [call.final(block).amax((-2, -1)).flatten(0, -2).amax(0) for block in rows]
    return torch.stack(blocks).amax(0)
