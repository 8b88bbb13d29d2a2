"""One number for each head, the largest over all processes: replicas share heads, stages and shards have their own."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ...models.live.tensors import entries_of
from .pairs import Pair

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
        device = next((values.device for values in largest.values()), self._device())
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

    def _device(self) -> torch.device:
        return next(iter(self.queries.values())).weight.read().device


def num_heads(pairs: Sequence[Pair], name: str) -> int:
    """The heads of a module, of which pairs may be a part each."""
    return max(pair.first + math.prod(pair.shape) for pair in pairs if pair.name == name)
