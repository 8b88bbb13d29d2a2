"""Locate attention in a model without a description, by the calls that its modules make, and over all processes:
replicas of a layer are one, and stages of a pipeline have layers of their own."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..attention.arguments import num_heads_of, with_four_dimensions
from ..attention.calls import AttentionCall
from ..head import Block
from ..models.live.tensors import entries_of
from ..models.module import PACKED, AttentionModule, refused_module
from .inputs import WatchedPass
from .report import LayerReport

AGAIN = "#"  # between a module's name and the number of its call, from the second on
Identity = tuple[Block, str, tuple[float, ...]]
RENAMED = (
    "processes hold different weights under the same names: each is a layer of its own here, as of stages of a "
    "pipeline, numbered in the order of processes"
)


def module_name(call: AttentionCall, modules: dict[str, nn.Module]) -> str | None:
    """The innermost of the model's modules that was running."""
    names = {id(module): name for name, module in modules.items()}
    return next((names[id(module)] for module in call.modules if id(module) in names), None)


def discovered(
    call: AttentionCall, run: WatchedPass, modules: dict[str, nn.Module], known: Sequence[AttentionModule]
) -> AttentionModule | None:
    """The site of a call: its innermost module's, or a further one if that calls more than once in a pass."""
    name = module_name(call, modules)
    if name is None:
        return None
    number = run.num_calls[name]
    run.num_calls[name] += 1
    name = call_name(name, number)
    site = next((site for site in known if site.query_name == name), None)
    if site is not None:
        return site
    block = _block(call)
    count = sum(site.block == block for site in known)
    return named_site(block, count, num_heads_of(call), name)


def call_name(name: str, number: int) -> str:
    """Name of the n-th call of a module in a pass."""
    return name if number == 0 else f"{name}{AGAIN}{number}"


def named_site(block: Block, number: int, num_heads: int, name: str) -> AttentionModule:
    """A layer of which only the calls are known."""
    reason = f"expected heads that a table names, got those of `{name}`, of which only the calls are known"
    return refused_module(block, (name, name), reason, number=number, num_heads=num_heads)


def repeated(sites: Sequence[AttentionModule]) -> Iterator[str]:
    """Modules that call a kernel several times in a pass, whatever for: chunks, heads, or two maps."""
    times = Counter(site.query_name.split(AGAIN)[0] for site in sites)
    several = [name for name, number in times.items() if number > 1]
    if several:
        more = f" and {len(several) - 1} more call" if len(several) > 1 else " calls"
        yield (
            f"`{several[0]}`{more} a kernel {times[several[0]]} times in a pass: each call is a layer of its own here, "
            "in their order"
        )


def _block(call: AttentionCall) -> Block:
    """Calls that do not look ahead are a decoder's; keys of another number than queries come from elsewhere.

    A single query shows no mask. Where its module was given no sequence as long as the keys, these are from a cache.
    """
    num_queries, num_keys = call.query.shape[-2], call.key.shape[-2]
    if num_queries == 1 and call.lengths and num_keys not in call.lengths:
        return "decoder"
    if num_queries > 1 and not bool(with_four_dimensions(call).admitted(slice(0, 1))[..., -1].any()):
        return "decoder"
    return "encoder" if num_queries == num_keys else "cross"


def silent_modules(modules: dict[str, nn.Module], softmaxes: set[str], calling: set[str]) -> Iterator[str]:
    """Modules that look like attention and called no kernel, in a model of which nothing else is known."""
    names, written = {name.split(AGAIN)[0] for name in calling}, written_out(modules, softmaxes, calling)
    if written:
        yield f"a softmax of its own, and no call of a kernel, in {', '.join(written)}: not looked at; name the heads"
    for name, module in modules.items():
        kind = type(module).__name__.lower()
        if ("attention" in kind or "attn" in kind) and not _is_among(name, names | softmaxes):
            yield f"`{name}` ({type(module).__name__}) looks like attention and called no kernel: it was not looked at"


def written_out(modules: dict[str, nn.Module], softmaxes: set[str], calling: set[str]) -> list[str]:
    """Modules that compute a softmax over pairs of tokens themselves, and called no kernel."""
    names = {name.split(AGAIN)[0] for name in calling}
    return [f"`{name}` ({type(modules[name]).__name__})" for name in sorted(softmaxes) if not _is_among(name, names)]


def _is_among(name: str, names: set[str]) -> bool:
    """Tell whether a module, one inside it or one around it is named."""
    return any(one == name or one.startswith(f"{name}.") or name.startswith(f"{one}.") for one in names)


def whole_call(call: AttentionCall, site: AttentionModule, modules: dict[str, nn.Module]) -> AttentionCall:
    """All heads of a call: under tensor parallelism each process has its own, and they are gathered in order."""
    if call.logits is not None or call.query.dim() != 4 or call.query.shape[1] == site.num_heads:
        return call
    weight = getattr(modules.get(site.query_name), "weight", None)
    if not isinstance(weight, DTensor) or Shard(0) not in weight.placements:
        return call
    group = weight.device_mesh.get_group(weight.placements.index(Shard(0)))
    if call.query.shape[1] * dist.get_world_size(group) != site.num_heads:
        return call
    sides: list[Tensor] = []
    for part in (call.query, call.key):
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part, group=group)
        sides.append(torch.cat(parts, 1))
    return call.changed(query=sides[0], key=sides[1])


class _Place(NamedTuple):
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
        self.places: dict[int, _Place] = {}
        self.known: dict[Identity, int] = {}
        self.foreign: set[int] = set()  # sites of other processes alone
        self.is_spread = False  # whether no process has all layers
        self.is_renamed = False  # whether different layers have one name

    def agree(self, sites: Sequence[AttentionModule], append: Callable[[AttentionModule], None]) -> None:
        """Exchange layers with all processes; those that are new to this one are appended to its sites."""
        own = [self._place(index, site) for index, site in enumerate(sites) if index not in self.foreign]
        lists: list[list[_Place]] = gather_objects(own, self.group)
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

    def _place(self, index: int, site: AttentionModule) -> _Place:
        if index not in self.places:
            mark = mark_of(site, self.modules)
            self.places[index] = _Place(site.block, site.number, site.num_heads, site.query_name, mark)
            self.known[self.places[index].identity] = index
        return self.places[index]

    def _number(self, places: Sequence[_Place], indices: Sequence[int]) -> None:
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


def gather_objects(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """One object of every process, in their order."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def exchange(layers: Sequence[LayerReport], group: dist.ProcessGroup | None) -> tuple[LayerReport, ...]:
    """The same layers with what only the process that holds them knows: their kernel, and their weights' numbers."""
    own = {(layer.block, layer.layer): (layer.through, layer.weights) for layer in layers if layer.through}
    everyone: dict[Any, Any] = {}
    for part in gather_objects(own, group):
        everyone |= part
    told = [everyone.get((layer.block, layer.layer), (layer.through, layer.weights)) for layer in layers]
    return tuple(
        replace(layer, through=through, weights=weights) for layer, (through, weights) in zip(layers, told, strict=True)
    )


def has_others(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
