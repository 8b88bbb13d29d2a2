"""Rates with which optimisers step, and a factor on them that no scheduler can undo: there only while one steps.

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
from .masters import DeepSpeed, DeepSpeed3, master_of
from .write_check import Optimizers, inner_optimizer, several

_FACTORS: "WeakKeyDictionary[Optimizer, RateFactor]" = WeakKeyDictionary()


class RateFactor:
    """The factors on one optimiser's rates, by who asked for them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parts: dict[int, float] = {}
        self.was_undone = self.was_told = False
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


def release_factor(optimizer: Optimizer, owner: object) -> None:
    """Take one owner's factor off; with the last the hooks go."""
    inner = inner_optimizer(optimizer)
    if inner is not None and inner in _FACTORS:
        factor = _FACTORS[inner]
        factor.parts.pop(id(owner), None)
        if not factor.parts:
            factor.close()
            del _FACTORS[inner]


def current_factor(optimizer: Optimizer) -> float:
    """The factor with which an optimiser steps now."""
    inner = inner_optimizer(optimizer)
    return 1.0 if inner is None or inner not in _FACTORS else _FACTORS[inner].value


def rates(optimizers: Iterable[Optimizer]) -> list[float]:
    """The first group's rate of each optimiser, as it steps."""
    return [float(one.param_groups[0]["lr"]) * current_factor(one) for one in optimizers]


class Rates:
    """Optimiser state of each parameter: the rate that it steps with, and the mean square of the gradients."""

    def __init__(self, optimizer: Optimizers) -> None:
        optimizers = several(optimizer)
        self.all_groups = [group for one in optimizers for group in one.param_groups]
        self.groups = {id(one): group for group in self.all_groups for one in group["params"]}
        self.factors = {id(group): current_factor(one) for one in optimizers for group in one.param_groups}
        self.state = {key: state for one in optimizers for key, state in one.state.items()}

    def learning_rate(self, parameter: Tensor, name: str) -> float:
        """Refuses an optimiser that does not own the parameter."""
        if (group := self._group(parameter)) is None:
            remedy = "pass the optimiser that trains this model, made after the model was sharded or wrapped"
            raise refusal(f"an optimiser that owns `{name}`", "one that does not", remedy)
        return float(group["lr"]) * self.factors[id(group)]

    def _owned(self, parameter: Tensor) -> Tensor:
        """Return the tensor in the optimiser's groups: the parameter, or its master."""
        master = None if id(parameter) in self.groups else master_of(parameter)
        return parameter if master is None or master.owned is None else master.owned

    def _group(self, parameter: Tensor) -> dict[str, Any] | None:
        group = self.groups.get(id(self._owned(parameter)))
        if group is None and isinstance(master_of(parameter), DeepSpeed | DeepSpeed3):  # whose groups hold flat copies
            if len({group["lr"] for group in self.all_groups}) != 1:
                raise refusal("one learning rate for all parameters under DeepSpeed", "several", "use one")
            return self.all_groups[0]
        return group

    def is_orthogonalised(self, parameter: Tensor) -> bool:
        """True if the optimiser makes steps of one size, whatever the gradient's: Muon."""
        return "ns_steps" in (self._group(parameter) or {})

    def second_moment(self, parameter: Tensor) -> tuple[Tensor, float] | None:
        """Adam's running mean of the squared gradient and what to multiply it by, since it starts at 0.

        None where the optimiser keeps none, or has not stepped yet.
        """
        state, group = self.state.get(self._owned(parameter), {}), self._group(parameter) or {}
        moment, steps = state.get("exp_avg_sq"), state.get("step", group.get("step"))
        master = master_of(parameter) if moment is None else None
        if master is not None and (steps := next((one["step"] for one in self.state.values() if "step" in one), steps)):
            moment = master.second_moment()  # a message to all processes, which have all stepped
        if moment is None or steps is None:
            return None
        return moment, 1 / (1 - group.get("betas", (0.0, 0.0))[1] ** float(steps))
