"""Localisation set from outside while a model trains: windows, temperatures, and spectra held where they are wanted."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from locater.attention.calls import AttentionCall
from locater.errors import refusal
from locater.spectra import moments
from locater.stabilisers import Stabiliser
from locater.stabilisers.live.find import find_pairs
from locater.stabilisers.live.interception import Slots
from locater.stabilisers.live.pairs import Pair
from locater.stabilisers.live.sharding import shard_of
from locater.stabilisers.mean import hold_trace

from ..rivals import SpectralInitialisation

ROUNDS = 3  # of mean and scale in turn; each undoes little of the other, and only what the optimiser moved


class Window(Stabiliser):
    """Every query sees its last `size` keys and no others."""

    def __init__(self, model: nn.Module, size: int) -> None:
        if size < 1:
            raise refusal("a window of at least 1 key", size)
        self.slots = Slots(find_pairs(model, trained=False), lambda name: Windowing(size))

    def detach(self) -> None:
        self.slots.remove()


@dataclass(frozen=True, eq=False)
class Windowing:
    """The handler of one module."""

    size: int

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        ones = torch.ones(call.query.shape[-2], call.key.shape[-2], dtype=torch.bool, device=call.query.device)
        return call.changed(attn_mask=ones.tril().triu(1 - self.size), is_causal=False).attend()


class Temperature(Stabiliser):
    """Every logit times `factor`: sharper attention above 1, flatter below, of the same weights."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        if not 0 < factor < math.inf:
            raise refusal("a positive, finite factor", factor)
        self.slots = Slots(find_pairs(model, trained=False), lambda name: Tempering(factor))

    def detach(self) -> None:
        self.slots.remove()


@dataclass(frozen=True, eq=False)
class Tempering:
    """The handler of one module."""

    factor: float

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        return call.changed(scale=self.factor * call.scaling).attend()


class Held(Stabiliser):
    """ξ and η (in units of λ) of every head, from the start and after every step; all else is free to learn."""

    def __init__(self, model: nn.Module, *, xi: float, eta: float) -> None:
        SpectralInitialisation(model, xi=xi, eta=eta)
        self.xi, self.eta, self.pairs = xi, eta, find_pairs(model)

    @torch.no_grad()
    def step(self) -> None:
        for pair in self.pairs:
            for _ in range(ROUNDS):
                hold(pair, self.xi, self.eta)


def hold(pair: Pair, xi: float, eta: float) -> None:
    """The trace to ξηλ by the smallest change, then both weights by one factor to ηλ."""
    shard = shard_of(pair, pair.weights())
    target = torch.full(pair.shape, xi * eta * pair.temperature, dtype=torch.float64)
    hold_trace(shard, target)
    size = eta * pair.temperature / moments(shard.query.double(), shard.key.double()).eta
    root = size.sqrt()[..., None, None].to(shard.query)
    shard.query.mul_(root)
    shard.key.mul_(root)
    shard.commit()
