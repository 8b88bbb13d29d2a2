"""QK-Clip: weights of a head rescaled after a step in which its logits grew too large.

Kimi Team 2025, "Kimi K2", arXiv 2507.20534: for latent attention as there, and for keys of their own or shared.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..attention.arguments import with_four_dimensions
from ..attention.calls import AttentionCall, in_backward
from ..attention.layers import bounds_by_weights
from ..errors import refusal
from ..models import read_heads
from ..models.live import open_live
from ..models.live.modules import Explicit
from ..models.live.tensors import WholeTensors, entries_of
from ..models.live.watch import Sample
from ..models.live.write_check import WriteCheck, forget_writer, note_writer
from ..records import State, head_key, layer_key
from .live.find import find_pairs
from .live.looking import Looker
from .live.pairs import Pair, check_stored, num_heads

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
            note_writer(model, self)

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
        """Clip the heads whose largest logit passed the threshold since the last step that was due."""
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
                pair.clip(clip_factors(self._logits_of(pair), self.threshold))

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
            values = self._logits_of(pair).flatten().tolist()
            found[f"qk/{key}/{label}"] = max(found.get(f"qk/{key}/{label}", -math.inf), *values)
            for number, value in enumerate(values if heads else ()):
                found[f"qk/{key}/{head_key(pair.first + number)}/{label}"] = value
        return found

    def _logits_of(self, pair: Pair) -> Float[Tensor, "groups heads"]:
        """Select the largest logits of the pair's heads from those of its module."""
        seen = len(self.last[pair.name])
        if seen < pair.first + math.prod(pair.shape):
            remedy = "clip before the heads are spread (tensor parallelism)"
            raise refusal(f"the logits of {math.prod(pair.shape)} heads in {pair.name}", f"those of {seen}", remedy)
        return self.last[pair.name][pair.first : pair.first + math.prod(pair.shape)].view(pair.shape)

    def detach(self) -> None:
        super().detach()
        forget_writer(self)
        if self.pairs:
            self.writes.close()


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
    rows = [slice(start, start + BLOCK) for start in range(0, call.query.shape[-2], BLOCK)]
    blocks = [call.final(block).amax((-2, -1)).flatten(0, -2).amax(0) for block in rows]
    return torch.stack(blocks).amax(0)


class Bounds:
    """The bounds of all heads of each pair's module; refused where no norm before attention bounds its inputs."""

    def __init__(
        self, model: nn.Module, pairs: Sequence[Pair], *, heads: Sequence[Explicit], sample: Sample | None
    ) -> None:
        tensors = WholeTensors(model)
        places = {
            (site.block, site.number): site
            for site in open_live(tensors.model, heads=heads, sample=sample, tensors=tensors).sites
        }
        self.sites = {pair.name: places[pair.block, pair.layer] for pair in pairs}
        for name, values in self.read().items():
            layer = read_heads(self.sites[name])
            if not bool(values.isfinite().all()) or any(head.softcap is not None for head in layer.heads):
                kinds = "heads whose weights bound their logits: after a norm, no QK-norm, soft-cap or latent keys"
                raise refusal(kinds, f"others in {name}", 'take by="logits"')

    @torch.no_grad()
    def read(self) -> dict[str, Tensor]:
        """The bounds at this moment, by the names of pairs."""
        return {name: bounds_by_weights(read_heads(site).heads).float() for name, site in self.sites.items()}


Identity = tuple[str, tuple[float, ...]]  # a module's name and some of its weights, which stages do not share


class Maxima:
    """Reduces by one message, in which every module of every process has its place; agreed on at the first."""

    def __init__(self, pairs: Sequence[Pair], group: dist.ProcessGroup | None) -> None:
        self.group, self.places = group, dict[Identity, tuple[int, int]]()
        self.queries = {pair.name: pair.query for pair in pairs}
        self.num_heads = {pair.name: num_heads(pairs, pair.name) for pair in pairs}
        self.identities: dict[str, Identity] = {}

    def reduce(self, largest: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The largest over all processes, of the modules that are this one's and that any has seen."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(self.group) == 1:
            return dict(largest)
        if not self.places:
            self._agree()
        of_weights = next(iter(self.queries.values())).weight.read().device
        device = next((values.device for values in largest.values()), of_weights)
        vector = torch.full((sum(size for _, size in self.places.values()),), -math.inf, device=device)
        for name, values in largest.items():
            start, _ = self.places[self.identities[name]]
            start += self._first(name, len(values))
            vector[start : start + len(values)] = values
        dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=self.group)
        is_seen = (vector > -math.inf).cpu()
        own = {name: self.places[self.identities[name]] for name in self.num_heads}
        return {name: vector.narrow(0, *place) for name, place in own.items() if is_seen.narrow(0, *place).any()}

    def _agree(self) -> None:
        self.identities = {name: (name, entries_of(rows.weight.read())) for name, rows in self.queries.items()}
        own = [(self.identities[name], number) for name, number in self.num_heads.items()]
        lists: list[list[tuple[Identity, int]]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(lists, own, group=self.group)
        start = 0
        for identity, size in dict(item for part in lists for item in part).items():
            self.places[identity] = start, size
            start += size

    def _first(self, name: str, number: int) -> int:
        """The first of the heads that this process computes: 0 but under tensor parallelism."""
        weight, rows = self.queries[name].weight.read(), self.queries[name]
        if number < self.num_heads[name] and isinstance(weight, DTensor):
            for dim, placement in enumerate(weight.placements):
                is_split = placement == Shard(rows.row_axis)
                if is_split and number * weight.device_mesh.size(dim) == self.num_heads[name]:
                    return number * weight.device_mesh.get_local_rank(dim)
        return 0
