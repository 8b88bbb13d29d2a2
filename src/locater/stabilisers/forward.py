"""Rivals in the forward pass: norms of queries and keys per head, and a cap on the logits.

RMS with a gain as in Dehghani et al. 2023 (ViT-22B, arXiv 2302.05442) and most language models since; L2 with a learned
temperature as in Henry et al. 2020 (arXiv 2010.04245). Soft-capping ω ↦ c·tanh(ω/c): Gemma Team 2024, arXiv 2408.00118;
after Bello et al. 2016.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..attention.calls import AttentionCall
from ..errors import refusal
from ..models.live.modules import Explicit
from ..models.live.watch import Sample
from ..projections import whole
from .base import Stabiliser
from .live.find import NORM, find_pairs
from .live.interception import Slots, check_no_full_graph, modules_of
from .live.pairs import Pair
from .live.sharding import check_not_spread


@runtime_checkable
class Kind(Protocol):
    """Learned parameters for a module's heads, and the changed call."""

    def make(self, pair: Pair, num_heads: int) -> nn.Module: ...
    def apply(self, learned: nn.Module, call: AttentionCall) -> AttentionCall: ...


class RMS:
    """γ_Q∘q/rms(q) · γ_K∘k/rms(k) / λ: logits within ±d_h/λ at gain one. The gains stand behind rotary positions."""

    def make(self, pair: Pair, num_heads: int) -> nn.Module:
        like = pair.weights()[0]
        size: Any = dict(device=like.device, dtype=like.dtype)
        return nn.ModuleDict({name: nn.RMSNorm(pair.query.d_head, eps=1e-6, **size) for name in ("query", "key")})

    def apply(self, learned: nn.Module, call: AttentionCall) -> AttentionCall:
        return call.changed(query=learned["query"](call.query), key=learned["key"](call.key))  # type: ignore[index]


class L2:
    """g · cos(q, k), with one learned g per head that starts at log₂(L² − L), L the length of the texts."""

    def __init__(self, length: int = 512) -> None:
        if length < 2:
            raise refusal("a length of at least 2", length)
        self.start = math.log2(length**2 - length)

    def make(self, pair: Pair, num_heads: int) -> nn.Module:
        like = pair.weights()[0]
        start = torch.full((num_heads, 1, 1), self.start, device=like.device, dtype=like.dtype)
        return nn.ParameterDict({"temperature": nn.Parameter(start)})

    def apply(self, learned: nn.Module, call: AttentionCall) -> AttentionCall:
        query = nn.functional.normalize(call.query, dim=-1) * learned["temperature"]  # type: ignore[index]
        return call.changed(query=query, key=nn.functional.normalize(call.key, dim=-1), scale=1.0)


class QKNorm(Stabiliser):
    """Attach before the optimiser is made, or give it `parameters()`: the gains are learned, and saved with the model.

    Cost: one pass over queries and keys; torch's own kernel does the rest.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kind: Kind | None = None,
        heads: Sequence[Explicit] = (),
        sample: Sample | None = None,
    ) -> None:
        check_not_spread(model)
        check_no_full_graph(model)
        self.kind = kind or RMS()
        self.modules: dict[str, nn.Module] = {}
        self.slots = Slots((), lambda name: Normalising(self.kind))
        self.begin(model, partial(self._find, model, heads), sample, heads)

    def _find(self, model: nn.Module, heads: Sequence[Explicit], sample: Sample | None) -> None:
        pairs = find_pairs(model, heads=heads, sample=sample, trained=False, latent=True)
        self.modules = {name: module for module, name in modules_of(pairs).items()}
        for name, module in self.modules.items():
            own = [pair for pair in pairs if pair.name == name]
            if hasattr(module, NORM):
                raise refusal("attention without a QK-norm of ours", f"one in {name}", "detach() the other first")
            module.add_module(NORM, self.kind.make(own[0], sum(math.prod(pair.shape) for pair in own)))
        self.slots = Slots(pairs, lambda name: Normalising(self.kind))

    def parameters(self) -> list[nn.Parameter]:
        self.check_found("the gains that the optimiser must be given")
        return [weight for module in self.modules.values() for weight in getattr(module, NORM).parameters()]

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        if self.waiting is not None:
            return {}
        means = [float(whole(parameter.detach()).abs().mean()) for parameter in self.parameters()]
        return {"qk_norm/gain": sum(means) / len(means)}

    def detach(self) -> None:
        super().detach()
        self.slots.remove()
        for module in self.modules.values():
            module._modules.pop(NORM, None)


@dataclass(frozen=True, eq=False)
class Normalising:
    """The handler of one module: what is learned is the module's own, so that a copy goes by the copy's."""

    kind: Kind

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        return self.kind.apply(getattr(module, NORM), call).attend()


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
        super().detach()
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
