"""Hooks that leave a compiled graph, and a question asked while it is made; importing them brings torch's compiler."""

from collections.abc import Callable

import torch
from torch import nn

from .capture import Hook
from .compilation import contexts


@torch.compiler.assume_constant_result
def in_full_graph() -> bool:
    """Tell whether the code around is compiled with fullgraph=True; asked while it is compiled, or when it runs."""
    return any(getattr(context, "fullgraph", False) for context in contexts())


class OutsideHook(Hook):
    """A hook that a compiled model steps out of its graph for; a full graph swallows it, and `is_swallowed` says so."""

    def __init__(self, module: nn.Module, function: Callable[..., None]) -> None:
        super().__init__(module, function)
        self.is_swallowed = False

        def swallow() -> bool:
            self.is_swallowed |= in_full_graph()
            return in_full_graph()

        self.swallow = torch.compiler.assume_constant_result(swallow)  # called once, as the graph is made

    def __call__(self, module: nn.Module, *given: object) -> None:
        if torch.compiler.is_compiling() and self.swallow():
            return
        self._outside(module, *given)  # type: ignore[call-arg]

    @torch.compiler.disable
    def _outside(self, module: nn.Module, *given: object) -> None:
        self.function(self.module, module, *given)
