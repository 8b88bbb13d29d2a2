"""A factor on the learning rate that no scheduler can undo: it is there while the optimiser steps, and only then.

Between steps a group's `lr` is the scheduler's own, whether that reads it (ReduceLROnPlateau, ExponentialLR) or writes
over it (LambdaLR, OneCycleLR), and so are the states that both save.
"""

from collections.abc import Iterable
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from ...errors import refusal
from .write_check import inner_optimizer

_FACTORS: "WeakKeyDictionary[Optimizer, RateFactor]" = WeakKeyDictionary()


class RateFactor:
    """The factors on one optimiser's rates, by who asked for them, and how many steps have had them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parts: dict[int, float] = {}
        self.num_scaled, self.was_undone = 0, False
        self.held: list[tuple[dict[str, Any], Any, Any]] = []  # groups, their own rates, and those that they step with
        self.handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @property
    def value(self) -> float:
        return prod(self.parts.values())

    def _before(self, optimizer: Optimizer, *further: object) -> None:
        """Scale; not twice where a step calls that of the class above, nor after a step that failed half-way."""
        if self.held:
            self._after(optimizer)
        for group in optimizer.param_groups if self.value != 1 else ():
            rate = group["lr"]
            if isinstance(rate, Tensor):  # compiled and captured optimisers know the tensor, not its value
                own = rate.clone()
                self.held.append((group, own, rate.mul_(self.value).clone()))
            else:
                group["lr"] = rate * self.value
                self.held.append((group, rate, group["lr"]))
        self.num_scaled += 1

    def _after(self, optimizer: Optimizer, *further: object) -> None:
        for group, own, scaled in self.held:
            if bool(group["lr"] != scaled):
                self.was_undone = True  # set within the step itself, which stands
            elif isinstance(group["lr"], Tensor):
                group["lr"].copy_(own)
            else:
                group["lr"] = own
        self.held = []

    def close(self) -> None:
        while self.handles:
            self.handles.pop().remove()


def factor_on(optimizer: Optimizer) -> RateFactor:
    """The factor on an optimiser, made if there is none; refuses one whose rate cannot be scaled."""
    inner = inner_optimizer(optimizer)
    if inner is None:
        remedy = "give the optimiser inside of it"
        raise refusal("an optimiser whose steps can be hooked", type(optimizer).__name__, remedy)
    for group in inner.param_groups:
        if not isinstance(group.get("lr"), int | float | Tensor):
            remedy = "give the optimiser a learning rate"
            raise refusal("a learning rate that is a number", f"{group.get('lr')} in {type(inner).__name__}", remedy)
    if inner not in _FACTORS:
        _FACTORS[inner] = RateFactor(inner)
    return _FACTORS[inner]


def release(optimizer: Optimizer, owner: object) -> None:
    """Take one owner's factor off; with the last the hooks go."""
    inner = inner_optimizer(optimizer)
    factor = None if inner is None else _FACTORS.get(inner)
    if inner is not None and factor is not None:
        factor.parts.pop(id(owner), None)
        if not factor.parts:
            factor.close()
            del _FACTORS[inner]


def current_factor(optimizer: Optimizer) -> float:
    """The factor with which an optimiser steps now."""
    inner = inner_optimizer(optimizer)
    factor = None if inner is None else _FACTORS.get(inner)
    return 1.0 if factor is None else factor.value


def rates(optimizers: Iterable[Optimizer]) -> list[float]:
    """The first group's rate of each optimiser, as it steps."""
    return [float(one.param_groups[0]["lr"]) * current_factor(one) for one in optimizers]
