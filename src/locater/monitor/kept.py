"""The state to which `RollBack` goes back: model, optimisers, master weights, and whatever else was given."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import refusal
from ..models.live.masters import DeepSpeed, DeepSpeed3, master_of, write_master
from ..models.live.write_check import RestoreCheck, in_doubt
from ..records import State
from .actions import Host

Kept = dict[str, Any]  # a step, and the states
REMEDY = "act by Checkpoint() or Stop(), and resume by hand"
COUNTED = ("last_epoch", "_last_lr", "_step_count")  # of a scheduler's state: where it is, which goes on


def keep(step: int | None, model: nn.Module, host: Host) -> Kept:
    parameters = dict(model.named_parameters())
    for optimizer in host.optimizers:
        in_doubt(parameters.values(), optimizer)  # makes masters known
    masters = {name: master for name, one in parameters.items() if (master := master_of(one)) is not None}
    if any(isinstance(master, DeepSpeed | DeepSpeed3) for master in masters.values()):
        raise refusal("an optimiser whose state can be put back", "DeepSpeed's", REMEDY)
    return {
        "step": step,
        "model": copy.deepcopy(model.state_dict()),
        "optimizers": [copy.deepcopy(one.state_dict()) for one in host.optimizers],
        "masters": {name: master.read().clone() for name, master in masters.items()},
        "others": [copy.deepcopy(one.state_dict()) for one in _movable(host.others)],
        "judged": [copy.deepcopy(_judgement(one)) for one in _judging(host.others)],
    }


def _movable(others: Sequence[Any]) -> list[Any]:
    """List what goes back with the weights: all but schedulers, which count steps of their own, and go on."""
    return [one for one in others if not hasattr(one, "get_last_lr")]


def _judging(others: Sequence[Any]) -> list[Any]:
    """Schedulers that judge losses: beside those of weights that are gone, each step would seem a bad one."""
    inner = [getattr(one, "scheduler", one) for one in others if hasattr(one, "get_last_lr")]  # accelerate wraps them
    return [one for one in inner if "metrics" in inspect.signature(one.step).parameters]


def _judgement(scheduler: Any) -> State:
    """Give the losses that it has seen, and what it counts by them."""
    return {name: value for name, value in scheduler.state_dict().items() if name not in COUNTED}


@contextmanager
def _same_rates(optimizer: Optimizer) -> Iterator[None]:
    """Leave every group's rate as it is: the same tensor, where it is one."""
    rates = [group["lr"] for group in optimizer.param_groups]
    yield
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _renumbered(kept: State, groups: Sequence[State]) -> State:
    """An optimiser's state for the groups of today; by its number a parameter that came into one shifts all others."""
    pairs = zip(kept["param_groups"], groups, strict=False)
    numbers = {old: new for before, now in pairs for old, new in zip(before["params"], now["params"], strict=False)}
    state = {numbers.get(number, number): one for number, one in copy.deepcopy(kept["state"]).items()}
    return {**kept, "state": state, "param_groups": groups}


def put_back(kept: Kept, model: nn.Module, host: Host, tell: Callable[[str], None]) -> None:
    """Everything that was kept; what an action has added to model or optimisers since stays as it is now."""
    now = model.state_dict()
    if lost := sorted(kept["model"].keys() - now.keys()):
        raise refusal(f"a parameter `{lost[0]}` to put back", "a model that has none since", REMEDY)
    optimizers = list(host.optimizers)
    checks = [RestoreCheck(model.parameters(), one, tell) for one in optimizers]
    model.load_state_dict({**now, **kept["model"]})
    for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
        # The groups' settings are the schedule's, which goes on.
        with _same_rates(optimizer):
            optimizer.load_state_dict(_renumbered(state, optimizer.state_dict()["param_groups"]))
    for name, value in kept["masters"].items():
        write_master(model.get_parameter(name), value)
    for other, state in zip(_movable(host.others), kept["others"], strict=True):
        other.load_state_dict(copy.deepcopy(state))
    for scheduler, judged in zip(_judging(host.others), kept.get("judged", ()), strict=False):
        with _same_rates(scheduler.optimizer):  # some write the rates that they had
            scheduler.load_state_dict({**scheduler.state_dict(), **copy.deepcopy(judged)})
    for check, optimizer in zip(checks, optimizers, strict=True):
        check.begin(optimizer)
