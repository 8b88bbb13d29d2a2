"""The training loop as far as actions need it, and what an action is told."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import missing, refusal
from ..models.live.watch import Sample
from ..records import State
from .report import SERIOUS, Report

if TYPE_CHECKING:
    from ..stabilisers import Stabiliser


class Host(Protocol):
    """The training loop, as far as an action needs it; callbacks of trainers are hosts.

    `others` have a `state_dict` too: schedulers, gradient scalers, averaged weights.
    """

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...
    @property
    def others(self) -> Sequence[Any]: ...
    def stop(self) -> None: ...
    def save(self, path: Path | None) -> None: ...


def part(entries: object) -> tuple[list[Optimizer], list[Any]]:
    """The optimisers among one or several objects with a `state_dict`, and the rest of them."""
    is_several = isinstance(entries, Iterable) and not hasattr(entries, "state_dict")
    several: list[Any] = list(entries) if is_several else [] if entries is None else [entries]  # type: ignore[call-overload]
    for one in several:
        if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
            kinds = "an optimiser, or several, and whatever else has a state_dict"
            raise refusal(f"as `optimizer` {kinds}", type(one).__name__)
    optimizers = [one for one in several if hasattr(one, "param_groups")]
    return optimizers, [one for one in several if not hasattr(one, "param_groups")]


def is_scheduler(other: object) -> bool:
    """Tell what counts steps of its own, which go on when weights go back."""
    return hasattr(other, "get_last_lr")


@dataclass
class OwnLoop:
    """A loop that looks at `monitor.should_stop`; checkpoints are written here, by torch."""

    model: nn.Module
    optimizers: list[Optimizer] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    should_stop: bool = False

    def stop(self) -> None:
        self.should_stop = True

    def save(self, path: Path | None) -> None:
        if path is None:
            raise missing("a path for the checkpoint", "pass Checkpoint(path)")
        state: State = {"model": self.model.state_dict()}
        states = [one.state_dict() for one in self.optimizers]
        if states:
            state["optimizer"] = states[0] if len(states) == 1 else states
        if self.others:
            state["others"] = [one.state_dict() for one in self.others]
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)


@dataclass
class Event:
    """A report, the model it is about, the loop that trains it, and the stabilisers that actions attached.

    `lines` say what actions did: they come into the report, its summary, the log and trackers.
    """

    report: Report
    model: nn.Module
    host: Host
    attached: "list[Stabiliser]" = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """The worst alarm, without advice."""
        alarms = [alarm for alarm in self.report.alarms if alarm.kind in SERIOUS] or list(self.report.alarms)
        if not alarms:
            return "no alarm"
        others = f" and {len(alarms) - 1} more" if len(alarms) > 1 else ""
        return f"{alarms[0].kind} in {alarms[0].place} ({alarms[0].figure:.4g}){others}"

    def say(self, what: str) -> None:
        self.lines.append(f"step {self.report.step}: {what}")


class Action:
    """Does nothing; each action replaces what it needs."""

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        """Find and try what will be needed; called once, at the model's first call, whose arguments are `sample`."""

    def __call__(self, event: Event) -> None: ...
    def good(self, event: Event) -> None: ...

    def check(self, host: Host) -> str | None:
        """Tell after a step of the optimiser, once, what has undone the action."""

    def end(self) -> None:
        """Leave model and optimisers: the monitor is detached."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None: ...
