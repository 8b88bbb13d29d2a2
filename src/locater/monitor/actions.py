"""Actions on an alarm: stop, save, go back to the last good state, attach a stabiliser, or anything.

An action is called with an `Event` after every report that has serious alarms, or those that it is named for;
`good(event)` after every one that has no serious one, and `begin` at the model's first call, to find and try what it
will need. No action ends a run but `Stop`: what fails is said, and the run goes on.
"""

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import missing, refusal
from ..models.live.watch import Sample
from ..records import State, write
from .report import RESTING, SERIOUS, Report

if TYPE_CHECKING:
    from ..stabilisers import Stabiliser

LOG = logging.getLogger("locater.monitor")


class Host(Protocol):
    """The training loop, as far as an action needs it; callbacks of trainers are hosts.

    `others` have a `state_dict` too: schedulers, gradient scalers, averaged weights.
    """

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...
    @property
    def others(self) -> Sequence[Any]: ...
    def stop(self) -> None: ...
    def save(self, path: Path | None) -> str: ...  # where to, in words


@dataclass
class OwnLoop:
    """A loop that looks at `monitor.should_stop`; checkpoints are written here, by torch."""

    model: nn.Module
    optimizers: list[Optimizer] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    should_stop: bool = False

    @classmethod
    def of(cls, model: nn.Module, entries: object) -> "OwnLoop":
        """A loop with the optimisers among one or several objects with a `state_dict`, and the rest of them."""
        is_several = isinstance(entries, Iterable) and not hasattr(entries, "state_dict")
        several: list[Any] = list(entries) if is_several else [] if entries is None else [entries]  # type: ignore[call-overload]
        for one in several:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                kinds = "an optimiser, or several, and whatever else has a state_dict"
                raise refusal(f"as `optimizer` {kinds}", type(one).__name__)
        others = [one for one in several if not hasattr(one, "param_groups")]
        return cls(model, [one for one in several if hasattr(one, "param_groups")], others)

    def stop(self) -> None:
        self.should_stop = True

    def save(self, path: Path | None) -> str:
        if path is None:
            raise missing("a path for the checkpoint", "pass Checkpoint(path)")
        state: State = {"model": self.model.state_dict()}
        states = [one.state_dict() for one in self.optimizers]
        if states:
            state["optimizer"] = states[0] if len(states) == 1 else states
        if self.others:
            state["others"] = [one.state_dict() for one in self.others]

        def put(temporary: Path) -> None:
            with temporary.open("wb") as file:  # torch's own writer says of a full disk that a position is unexpected
                torch.save(state, file)

        write(path, put)
        return f"to {path}"


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

    def resume(self, host: Host) -> None:
        """Put back what a loaded state says of the loop, before its first step: a first call may lie within that."""

    def end(self) -> None:
        """Leave model and optimisers: the monitor is detached."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None: ...


class Stop(Action):
    """End the training: in a trainer by its own means, in a loop of yours by `monitor.should_stop`."""

    def __call__(self, event: Event) -> None:
        event.host.stop()
        event.say(f"stopped, because of {event.reason}")


class Checkpoint(Action):
    """Save at the first alarm, to look at afterwards: by the trainer's own means, or to `path` (it may say {step})."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path, self.is_done = path, False

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        path = self._path(0)
        if path is None and isinstance(host, OwnLoop):
            raise missing("a path for the checkpoint", "pass Checkpoint(path)")
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as reason:
                raise refusal("a folder that can be made", str(path.parent)) from reason
            if not os.access(path.parent, os.W_OK):
                raise refusal("a folder that can be written to", str(path.parent))

    def _path(self, step: int) -> Path | None:
        return None if self.path is None else Path(str(self.path).format(step=step))

    def __call__(self, event: Event) -> None:
        if not self.is_done:
            path = self._path(event.report.step)
            where = event.host.save(path)
            self.is_done = True
            event.say(f"saved the state after this step {where}, because of {event.reason}")

    def state_dict(self) -> State:
        return {"is_done": self.is_done}

    def load_state_dict(self, state: State) -> None:
        self.is_done = state["is_done"]


class _Call(Action):
    """A function of the event."""

    def __init__(self, function: Callable[[Event], object]) -> None:
        self.function = function

    def __call__(self, event: Event) -> None:
        self.function(event)


Actions = Action | Callable[[Event], object] | Sequence[object] | Mapping[str, object]


class Responses:
    """`on_alarm`: an action for every serious alarm, several, or a table of them by the kind of alarm.

    Heads that rest are acted on only by their own names; a function is told of every alarm.
    """

    def __init__(self, actions: Actions | None) -> None:
        table = actions if isinstance(actions, Mapping) else {"": actions} if actions is not None else {}
        for kind in table:
            if kind not in ("", *SERIOUS, *RESTING):
                raise refusal(f"kinds of alarms ({', '.join((*SERIOUS, *RESTING))})", repr(kind))
        lists = {kind: entry if isinstance(entry, list | tuple) else [entry] for kind, entry in table.items()}
        self.table = {kind: [_action(one) for one in entries] for kind, entries in lists.items()}
        self.lines: list[str] = []  # for the next report
        self.failed = set[tuple[Action, str]]()  # reasons that were said why one could not act

    def all(self) -> list[Action]:
        return list(dict.fromkeys(action for actions in self.table.values() for action in actions))

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        for action in self.all():
            action.begin(model, host, sample)

    def act(self, event: Event) -> Report:
        """Answer a report; return it with a line for everything that was done since the last one."""
        event.lines, self.lines = self.lines, []
        kinds = {alarm.kind for alarm in event.report.alarms}
        serious = kinds.intersection(SERIOUS)
        for action in self.all():  # each once, however many kinds it is for
            wanted = {kind for kind, actions in self.table.items() if action in actions}
            unnamed = kinds if isinstance(action, _Call) else serious
            if wanted & kinds or ("" in wanted and unnamed):
                self._do(action, action, event)
            elif not serious:
                self._do(action, action.good, event)
        return replace(event.report, actions=tuple(event.lines))

    def _do(self, action: Action, act: Callable[[Event], None], event: Event) -> None:
        """One action, which must not end the run; a function of the user's may."""
        if isinstance(action, _Call):
            act(event)
            return
        try:
            act(event)
        except Exception as reason:  # whatever it is: the run goes on, and it is said once
            words = f"{type(action).__name__} could not act: {type(reason).__name__}: {reason}"
            kind = action, re.sub(r"[\d.]+", "", words)  # the same reason with other numbers is no news
            if kind not in self.failed:
                self.failed.add(kind)
                warnings.warn(words, stacklevel=4)
                event.say(words)

    def step(self, number: int, host: Host, stabilisers: "list[Stabiliser]") -> None:
        """Step what actions attached; what fails is taken off, and the run goes on."""
        found = []
        for stabiliser in list(stabilisers):
            try:
                stabiliser.step()
            except Exception as reason:  # whatever it is, it must not end the run
                stabilisers.remove(stabiliser)
                stabiliser.detach()
                found.append(f"took {type(stabiliser).__name__} off, which failed: {reason}")
        found += [words for action in self.all() if (words := action.check(host)) is not None]
        for words in found:
            warnings.warn(words, stacklevel=3)
            self.lines.append(f"step {number}: {words}")

    def attached(self) -> "list[Stabiliser]":
        made = (getattr(action, "stabiliser", None) for action in self.all())
        return [stabiliser for stabiliser in made if stabiliser is not None]

    @property
    def is_pending(self) -> bool:
        """Tell whether a loaded state has a stabiliser that is not attached again yet."""
        return any(getattr(action, "pending", None) is not None for action in self.all())

    def end(self) -> None:
        """Tell every action that the monitor is detached."""
        for action in self.all():
            action.end()


def _action(entry: object) -> Action:
    if isinstance(entry, Action):
        return entry
    if isinstance(entry, type) or not callable(entry):
        raise refusal("an action such as Stop(), Checkpoint(), RollBack(), Attach(…) or a function", repr(entry))
    return _Call(entry)
