"""Named tensors of which each is read once: the heads of a layer share norms, tables and whole projections."""

from collections.abc import Collection

from torch import Tensor

from .places import Tensors


class Once:
    """Holds what was read for as long as it lives itself: one layer."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.held: dict[tuple[str, tuple[int, int] | None], Tensor] = {}

    @property
    def names(self) -> Collection[str]:
        return self.tensors.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(name)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        if (name, rows) not in self.held:
            self.held[name, rows] = self.tensors.read(name, rows)
        return self.held[name, rows]
