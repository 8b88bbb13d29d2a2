"""Where a live model keeps the queries and keys of its heads: which parameter, which rows.

Found once, through the same tables as a scan; the weights are read anew each time, so sharding may come later.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...models.live import ModuleTensors
from ...models.live.tensors import adapted, named_modules

SPACING = 2.0**24  # more than any weight has rows and columns


@dataclass(frozen=True)
class Weight:
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
        weight = getattr(self.module, self.attribute)
        return weight if self.adapted is None else adapted(weight, self.adapted)

    @property
    def identity(self) -> tuple[int, str]:
        """Equal for one parameter under two names."""
        stored = self.module._parameters.get(self.attribute)
        return (id(self.module), self.attribute) if stored is None else (id(stored), "")

    @property
    def is_stored(self) -> bool:
        """Whether the weight is a parameter itself, not computed from others."""
        return self.module._parameters.get(self.attribute) is not None and (self.adapted is None or self.adapted.merged)

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

    weight: Weight
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
        """Whether the heads follow each other without a gap."""
        in_group = self.num_heads == 1 or self.head_step == self.d_head
        return in_group and (self.num_groups == 1 or self.group_step == self.num_heads * self.d_head)

    @property
    def is_whole(self) -> bool:
        """Whether the heads, in order, are all that the weight holds."""
        stored = self.weight.read().shape[self.row_axis]
        return self.first == 0 and stored == self.num_rows and self.is_dense


class Markers(ModuleTensors):
    """A model's tensors with numbers in place of weights, from which a slice tells where it was cut.

    Entry (i, j) of the n-th tensor is n·SPACING + i + 2j; the strides 1 and 2 also survive a transposition.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        modules = named_modules(self.model)
        self.weights: dict[str, Weight] = {}
        for name, (module, attribute) in self.owners.items():
            # A projection stands one level below its attention module; `in_proj_weight` belongs to that itself.
            owner = name.rpartition(".")[0]
            attention = modules.get(owner.rpartition(".")[0], module) if attribute == "weight" else module
            self.weights[name] = Weight(name, module, attribute, attention, self.adapters.get(id(module)))
        self.order = tuple(self.weights.values())
        self.index = {name: number for number, name in enumerate(self.weights)}

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        shape = self.shape(name)
        steps = tuple(range(1, 1 + len(shape)))
        span = 1 + sum(step * (size - 1) for step, size in zip(steps, shape, strict=True))
        numbers = self.index[name] * SPACING + torch.arange(max(span, 1), dtype=torch.float64)
        marked = numbers.as_strided(shape, steps)
        return marked if rows is None else marked[rows[0] : rows[1]]

    def locate(self, weight: Float[Tensor, "d_head d_model"]) -> tuple[Weight, int, bool]:
        """The weight that a slice was cut from, its first row there, and whether it is stored as (in, out)."""
        number, first = divmod(float(weight[0, 0]), SPACING)
        transposed = weight.stride(0) != 1
        return self.order[int(number)], int(first) // (2 if transposed else 1), transposed
