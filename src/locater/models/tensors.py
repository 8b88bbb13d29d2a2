"""Named tensors, read when asked for: each once per layer, and stacks of layers taken apart."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

from torch import Tensor

from ..budget import budget


class Tensors(Protocol):
    """Named tensors, read when asked for: a checkpoint or a live module."""

    @property
    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Held:
    """Tensors in memory, as a checkpoint would hold them."""

    tensors: dict[str, Tensor]

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        return self.tensors[name] if rows is None else self.tensors[name][rows[0] : rows[1]]


class Once:
    """Holds what was read of one layer, until another is asked for: neighbours may share theirs (ALBERT)."""

    def __init__(self, tensors: Tensors, layer: str = "") -> None:
        self.tensors, self.names, self.layer = tensors, tensors.names, layer
        self.held: dict[tuple[str, tuple[int, int] | None], Tensor] = {}
        self.shape = cache(tensors.shape)

    def begin(self, layer: str) -> None:
        """Free what another layer has; layers are known by the name of their queries."""
        if layer != self.layer:
            self.layer, self.held = layer, {}

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        if (name, rows) not in self.held:
            self.held[name, rows] = self.tensors.read(name, rows)
        return self.held[name, rows]


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
