"""The parameters of a live model that hold queries and keys, and the heads as views of their rows.

Found once; the weights are read anew each time, so sharding may come later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...models.live.masters import current, write_master
from ...models.live.tensors import ModuleTensors, adapted, held, is_stored, named_modules
from ...models.slices import Slice
from ...projections import widen


@dataclass(frozen=True)
class LiveWeight:
    """One weight of a live module, and the attention module that it serves.

    `adapted` is the module that adds a low-rank update to it (LoRA), if any.
    """

    name: str
    module: nn.Module
    attribute: str
    attention: nn.Module
    adapted: Any = None

    def read(self) -> Tensor:
        """The weight that the forward pass uses: the parameter itself, or what is computed from parameters."""
        weight = held(self.module, self.attribute)
        return weight if self.adapted is None else adapted(weight, self.adapted)

    @property
    def identity(self) -> tuple[int, str]:
        """Equal for one parameter under two names."""
        stored = self.module._parameters.get(self.attribute)
        return (id(self.module), self.attribute) if stored is None else (id(stored), "")

    @property
    def is_stored(self) -> bool:
        """True if the weight is a parameter itself, not computed from others."""
        return is_stored(self.module, self.attribute, self.adapted)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters that the weight is computed from, by name."""
        named = (self.adapted or self.module).named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    @property
    def is_trained(self) -> bool:
        return self.read().requires_grad


@dataclass(frozen=True)
class Rows:
    """Rows of a weight as heads in groups: head h of group g starts at first + g·group_step + h·head_step."""

    weight: LiveWeight
    transposed: bool
    d_head: int
    num_groups: int
    num_heads: int
    first: int
    group_step: int
    head_step: int

    def view(self, values: Float[Tensor, "rows columns"]) -> Float[Tensor, "groups heads d_head d_model"]:
        """The heads inside a tensor that is laid out as the weight: a view, whatever the layout."""
        matrix = values.mT if self.transposed else values
        row, column = matrix.stride()
        size = (self.num_groups, self.num_heads, self.d_head, matrix.shape[1])
        steps = (self.group_step * row, self.head_step * row, row, column)
        return matrix[self.first :].as_strided(size, steps)

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for the same rows of the same parameter."""
        return *self.weight.identity, self.first, self.group_step, self.head_step

    @property
    def row_axis(self) -> int:
        return 1 if self.transposed else 0

    @property
    def num_rows(self) -> int:
        return self.num_groups * self.num_heads * self.d_head

    @property
    def is_dense(self) -> bool:
        """True if the heads follow each other without a gap."""
        in_group = self.num_heads == 1 or self.head_step == self.d_head
        return in_group and (self.num_groups == 1 or self.group_step == self.num_heads * self.d_head)

    @property
    def is_whole(self) -> bool:
        """True if the heads, in order, are all that the weight holds."""
        stored = self.weight.read().shape[self.row_axis]
        return self.first == 0 and stored == self.num_rows and self.is_dense

    @property
    def places(self) -> Int[Tensor, "groups heads d_head"]:
        """The row of the weight that each row of each head is."""
        groups = torch.arange(self.num_groups)[:, None, None] * self.group_step
        return self.first + groups + torch.arange(self.num_heads)[:, None] * self.head_step + torch.arange(self.d_head)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the projection that the weight belongs to."""
        name = self.weight.attribute.replace("weight", "bias")
        return held(self.weight.module, name) if hasattr(self.weight.module, name) else None

    @property
    def is_bias_stored(self) -> bool:
        """True if there is no bias, or one that is a parameter itself."""
        return self.bias is None or any(self.bias is one for one in self.weight.module._parameters.values())

    @torch.no_grad()
    def scale(self, factors: Float[Tensor, "groups heads #d_head"]) -> None:
        """Multiply these rows of the weight, and of its bias, each by its number; sharded ones in their shards."""
        weight = self.weight.read()
        num_rows = getattr(weight, "ds_shape", weight.shape)[self.row_axis]
        numbers = torch.ones(num_rows, dtype=torch.float32, device=weight.device)
        numbers[self.places.to(numbers.device)] = factors.to(numbers).expand(-1, -1, self.d_head)
        for tensor, axis in ((weight, self.row_axis), (self.bias, 0)):
            if tensor is not None:
                _multiply(tensor, numbers, axis)


def _multiply(parameter: Tensor, numbers: Tensor, axis: int) -> None:
    """Each row by its number, rounded once; what is sharded is cut alike."""
    tensor = current(parameter)
    numbers = numbers.unflatten(0, [-1 if n == axis else 1 for n in range(tensor.dim())])
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        spread = numbers.expand(tensor.shape).contiguous()
        same = DTensor.from_local(spread, mesh, [Replicate()] * mesh.ndim, run_check=False)
        tensor, numbers = tensor.to_local(), same.redistribute(mesh, tensor.placements).to_local()
    write_master(parameter, widen(tensor) * numbers)


def find_weight(tensors: ModuleTensors, name: str, caller: str | None = None) -> LiveWeight:
    """The parameter of that name, or what is computed under it; `caller` is the module that called the kernel."""
    (module, attribute), modules = tensors.owners[name], named_modules(tensors.model)
    # A projection stands one level below its attention module; `in_proj_weight` belongs to that itself.
    outer = name.rpartition(".")[0].rpartition(".")[0]
    if caller is not None:  # it may stand deeper, or beside what calls the kernel (torchtitan), or in another layer too
        places = [place.rpartition(".")[0] for place, one in modules.items() if one is module]
        outer = max((_shared(place, caller) for place in places), key=len)
    attention = modules.get(outer, module) if attribute == "weight" else module
    return LiveWeight(name, module, attribute, attention, tensors.adapters.get(id(module)))


def _shared(place: str, caller: str) -> str:
    """The path that two modules share.

    >>> _shared("layers.0.attention.maps", "layers.0.attention.inner")
    'layers.0.attention'
    """
    both = zip(place.split("."), caller.split("."), strict=False)
    return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))


def find_rows(heads: Sequence[Sequence[Slice]], tensors: ModuleTensors, caller: str | None = None) -> Rows | None:
    """Heads in groups as rows of one weight at even steps; None where they do not lie so."""
    start, size = heads[0][0], len(heads[0])
    head_step = heads[0][1].first - start.first if size > 1 else 0
    group_step = heads[1][0].first - start.first if len(heads) > 1 else size * start.count
    for (group, several), head in product(enumerate(heads), range(size)):
        if several[head] != replace(start, first=start.first + group * group_step + head * head_step):
            return None
    steps = start.first, group_step, head_step
    return Rows(find_weight(tensors, start.parameter, caller), start.transposed, start.count, len(heads), size, *steps)
