"""Layers over all processes: replicas of a layer are one, and stages of a pipeline have layers of their own."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from ..head import Block
from ..models.live.tensors import entries_of
from ..models.module import PACKED, AttentionModule
from .places import AGAIN, named_site
from .report import LayerReport

Identity = tuple[Block, str, tuple[float, ...]]


RENAMED = (
    "processes hold different weights under the same names: each is a layer of its own here, as of stages of a "
    "pipeline, numbered in the order of processes"
)


class Place(NamedTuple):
    """One layer as a process knows it; `mark` holds some of its weights, and is empty where these are spread."""

    block: Block
    number: int
    num_heads: int
    name: str
    mark: tuple[float, ...]

    @property
    def identity(self) -> Identity:
        return self.block, self.name, self.mark


class Agreement:
    """The layers of all processes in one order, which all of them know: each as the index of a site of this one.

    Layers of one name are replicas if their weights are alike. They are described to others once, by the weights that
    they have then.
    """

    def __init__(self, modules: dict[str, nn.Module], group: dist.ProcessGroup | None) -> None:
        self.modules, self.group = modules, group
        self.settled: list[int] | None = None
        self.numbers: dict[int, int] = {}  # a site's index to its layer's number over all processes
        self.places: dict[int, Place] = {}
        self.known: dict[Identity, int] = {}
        self.foreign: set[int] = set()  # sites of other processes alone
        self.is_spread = False  # whether no process has all layers
        self.is_renamed = False  # whether different layers have one name

    def agree(self, sites: Sequence[AttentionModule], append: Callable[[AttentionModule], None]) -> None:
        """Exchange layers with all processes; those that are new to this one are appended to its sites."""
        own = [self._place(index, site) for index, site in enumerate(sites) if index not in self.foreign]
        lists: list[list[Place]] = gather(own, self.group)
        everyone = {place.identity: place for places in lists for place in places}
        self.is_spread = len(everyone) > max(map(len, lists))
        self.is_renamed = len({(place.block, place.name) for place in everyone.values()}) < len(everyone)
        for identity, place in everyone.items():
            if identity not in self.known:
                self.foreign.add(len(sites))
                self.known[identity] = len(sites)
                append(named_site(place.block, place.number, place.num_heads, place.name))
        self.settled = [self.known[identity] for identity in everyone]
        self._number(list(everyone.values()), self.settled)

    def _place(self, index: int, site: AttentionModule) -> Place:
        if index not in self.places:
            mark = mark_of(site, self.modules)
            self.places[index] = Place(site.block, site.number, site.num_heads, site.query_name, mark)
            self.known[self.places[index].identity] = index
        return self.places[index]

    def _number(self, places: Sequence[Place], indices: Sequence[int]) -> None:
        """Keep the numbers of layers where they are unique; else count layers in the order of processes."""
        is_unique = len({(place.block, place.number) for place in places}) == len(places)
        counts: Counter[Block] = Counter()
        for place, index in zip(places, indices, strict=True):
            self.numbers[index] = place.number if is_unique else counts[place.block]
            counts[place.block] += 1

    def order(self, num_sites: int) -> Sequence[int]:
        return range(num_sites) if self.settled is None else self.settled

    def may_be(self, index: int, site: AttentionModule) -> bool:
        """Tell whether a site may be this process's: one of other processes only if the weights are alike."""
        if index not in self.foreign or not self.is_spread:
            return True
        return self.known.get((site.block, site.query_name, mark_of(site, self.modules))) == index


def mark_of(site: AttentionModule, modules: dict[str, nn.Module]) -> tuple[float, ...]:
    """Some entries of the first weight of a layer's module, by which its replicas on other processes are recognised."""
    name = site.query_name.split(AGAIN)[0]
    module = modules.get(site.owner if name.endswith(PACKED) else name)
    return entries_of(next(iter(module.parameters()), None) if module is not None else None)


def gather(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """One object of every process, in their order."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def exchange(layers: Sequence[LayerReport], group: dist.ProcessGroup | None) -> tuple[LayerReport, ...]:
    """The same layers with what only the process that holds them knows: their kernel, and their weights' numbers."""
    own = {(layer.block, layer.layer): (layer.through, layer.weights) for layer in layers if layer.through}
    everyone: dict[Any, Any] = {}
    for part in gather(own, group):
        everyone |= part
    told = [everyone.get((layer.block, layer.layer), (layer.through, layer.weights)) for layer in layers]
    return tuple(
        replace(layer, through=through, weights=weights) for layer, (through, weights) in zip(layers, told, strict=True)
    )


def has_others(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
