"""Actions on an alarm: stop, save, go back to the last good state, attach a stabiliser, or anything.

An action is called with an `Event` after every report that has alarms; `good(event)` after every one that has no
serious one, and `begin` at the model's first call, to find and try what it will need. No action ends a run but `Stop`:
what fails is said, and the run goes on.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ..errors import missing, refusal
from ..models.live.watch import Sample
from ..records import State
from .attach import Attach
from .host import Action, Event, Host, OwnLoop
from .report import AHEAD, RESTING, SERIOUS, Report
from .roll_back import RollBack

if TYPE_CHECKING:
    from ..stabilisers import Stabiliser

__all__ = ["Action", "Actions", "Attach", "Checkpoint", "Event", "Host", "OwnLoop", "Responses", "RollBack", "Stop"]

LOG = logging.getLogger("locater.monitor")


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
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK):
                raise refusal("a folder that can be written to", str(path.parent))

    def _path(self, step: int) -> Path | None:
        return None if self.path is None else Path(str(self.path).format(step=step))

    def __call__(self, event: Event) -> None:
        if not self.is_done:
            path = self._path(event.report.step)
            event.host.save(path)
            self.is_done = True
            where = f" to {path}" if path is not None else " by the trainer"
            event.say(f"saved the state after this step{where}, because of {event.reason}")

    def state_dict(self) -> State:
        return {"is_done": self.is_done}

    def load_state_dict(self, state: State) -> None:
        self.is_done = state["is_done"]


class Call(Action):
    """A function of the event."""

    def __init__(self, function: Callable[[Event], object]) -> None:
        self.function = function

    def __call__(self, event: Event) -> None:
        self.function(event)


Actions = Action | Callable[[Event], object] | Iterable[object] | Mapping[str, object]


class Responses:
    """`on_alarm`: an action for every alarm, several, or a table of them by the kind of alarm."""

    def __init__(self, actions: Actions | None) -> None:
        table = actions if isinstance(actions, Mapping) else {"": actions} if actions is not None else {}
        for kind in table:
            if kind not in ("", AHEAD, *SERIOUS, *RESTING):
                raise refusal(f"kinds of alarms ({', '.join((*SERIOUS, *RESTING, AHEAD))})", repr(kind))
        self.table = {kind: [_action(one) for one in _several(entry)] for kind, entry in table.items()}
        self.lines: list[str] = []  # for the next report

    def check_forecast(self, steps_ahead: int | None) -> None:
        """Refuse an action on forecasts where none are made."""
        if AHEAD in self.table and steps_ahead is None:
            remedy = "give thresholds=Thresholds(steps_ahead=…)"
            raise missing(f"forecasts to act on {AHEAD!r}, which are off by default", remedy)

    def all(self) -> list[Action]:
        return list(dict.fromkeys(action for actions in self.table.values() for action in actions))

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        for action in self.all():
            action.begin(model, host, sample)

    def __call__(self, event: Event) -> None:
        kinds = {alarm.kind for alarm in event.report.alarms}
        present = kinds - {AHEAD}  # a forecast is acted on only by its own name
        for action in self.all():  # each once, however many kinds it is for
            wanted = {kind for kind, actions in self.table.items() if action in actions}
            if wanted & kinds or ("" in wanted and present):
                _do(action, action, event)
            elif not present.intersection(SERIOUS):
                _do(action, action.good, event)

    def act(self, event: Event) -> Report:
        """Answer a report; return it with a line for everything that was done since the last one."""
        event.lines, self.lines = self.lines, []
        self(event)
        return replace(event.report, actions=tuple(event.lines))

    def step(self, number: int, host: Host, stabilisers: "list[Stabiliser]", num_given: int) -> None:
        """Step what actions attached, behind the first `num_given`; what fails is taken off, and the run goes on."""
        found = []
        for stabiliser in stabilisers[num_given:]:
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
        for action in self.all():
            action.end()


def _do(action: Action, act: Callable[[Event], None], event: Event) -> None:
    """One action, which must not end the run; a function of the user's may."""
    if isinstance(action, Call):
        act(event)
        return
    try:
        act(event)
    except Exception as reason:  # whatever it is: the run goes on, and it is said
        words = f"{type(action).__name__} could not act: {type(reason).__name__}: {reason}"
        warnings.warn(words, stacklevel=4)
        event.say(words)


def _several(entry: object) -> list[object]:
    return list(entry) if isinstance(entry, Iterable) and not isinstance(entry, str) else [entry]


def _action(entry: object) -> Action:
    if isinstance(entry, Action):
        return entry
    if isinstance(entry, type) or not callable(entry):
        raise refusal("an action such as Stop(), Checkpoint(), RollBack(), Attach(…) or a function", repr(entry))
    return Call(entry)
