"""Tensors that hold all layers along their first axis (Megatron-Core), seen as one tensor for each layer."""

import re
from collections.abc import Collection
from functools import cached_property

from torch import Tensor

from ..budget import budget
from .places import Tensors

STACK = re.compile(r"^(?P<before>(?:.*\.)?decoder\.layers)\.(?P<inside>[a-z]\w*\..+)$")


class Unstacked:
    """`layers.self_attention.x` of shape (L, …) goes by `layers.0.self_attention.x`, … ; a read takes one layer."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    @cached_property
    def places(self) -> dict[str, tuple[str, int | None]]:
        """From a name to the stored tensor and the layer in it."""
        found: dict[str, tuple[str, int | None]] = {}
        limits, letters = budget(), 0
        for name in self.tensors.names:
            stack, shape = STACK.match(name), self.tensors.shape(name)
            if stack is None or not shape:
                found[name] = name, None
                continue
            limits.check("tensors", len(found) + limits.check("layers", shape[0]))
            letters = limits.check("names", letters + shape[0] * len(name))
            for layer in range(shape[0]):
                found[f"{stack['before']}.{layer}.{stack['inside']}"] = name, layer
        return found

    @property
    def names(self) -> Collection[str]:
        return self.places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored, layer = self.places[name]
        return self.tensors.shape(stored)[0 if layer is None else 1 :]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        stored, layer = self.places[name]
        if layer is None:
            return self.tensors.read(stored, rows)
        tensor = self.tensors.read(stored, (layer, layer + 1))[0]
        return tensor if rows is None else tensor[rows[0] : rows[1]]


def unstacked(tensors: Tensors) -> Tensors:
    """The tensors themselves where none is a stack of layers with fused queries and keys."""
    is_stack = any(name.endswith("layers.self_attention.linear_qkv.weight") for name in tensors.names)
    return Unstacked(tensors) if is_stack else tensors
