"""Actions on an alarm: stop, save, go back to the last good state, attach a stabiliser, or anything.

An action is called with an `Event` after every report that has alarms; `good(event)` after every one that has no
serious one, and `begin` before the first.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import refusal, within
from ..models import live
from ..models.live.masters import DeepSpeed, DeepSpeed3, master_of, write
from ..models.live.watch import Sample
from ..models.live.write_check import RestoreCheck, in_doubt
from ..records import State
from .report import AHEAD, RESTING, SERIOUS, Report

if TYPE_CHECKING:
    from ..stabilisers import Stabiliser


class Host(Protocol):
    """The training loop, as far as an action needs it; callbacks of trainers are hosts."""

    optimizer: Optimizer | None
    scheduler: Any

    def stop(self) -> None: ...
    def save(self, path: Path | None) -> None: ...


@dataclass
class OwnLoop:
    """A loop that looks at `monitor.should_stop`; checkpoints are written here, by torch."""

    model: nn.Module
    optimizer: Optimizer | None = None
    scheduler: Any = None
    should_stop: bool = False

    def stop(self) -> None:
        self.should_stop = True

    def save(self, path: Path | None) -> None:
        if path is None:
            raise refusal("a path for the checkpoint", "none", "pass Checkpoint(path)")
        state = {"model": self.model.state_dict()}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path)


@dataclass
class Event:
    """A report, the model it is about, the loop that trains it, and the stabilisers that actions attached."""

    report: Report
    model: nn.Module
    host: Host
    attached: "list[Stabiliser]" = field(default_factory=list)


class Action:
    """Does nothing; each action replaces what it needs."""

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None: ...
    def __call__(self, event: Event) -> None: ...
    def good(self, event: Event) -> None: ...

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None: ...


class Stop(Action):
    """End the training: in a trainer by its own means, in a loop of yours by `monitor.should_stop`."""

    def __call__(self, event: Event) -> None:
        event.host.stop()


class Checkpoint(Action):
    """Save at the first alarm, to look at afterwards: by the trainer's own means, or to `path` (it may say {step})."""

    def __init__(self, path: str | Path | None = None) -> None:
        self.path, self.is_done = path, False

    def __call__(self, event: Event) -> None:
        if not self.is_done:
            self.is_done = True
            event.host.save(None if self.path is None else Path(str(self.path).format(step=event.report.step)))

    def state_dict(self) -> State:
        return {"is_done": self.is_done}

    def load_state_dict(self, state: State) -> None:
        self.is_done = state["is_done"]


Kept = tuple[State, ...]  # of the model, of the optimiser, and its master weights
REMEDY = "act by Checkpoint() or Stop(), and resume by hand"


class RollBack(Action):
    """Back to the last good state, with `factor` times the learning rate, at most `most` times; then stop.

    A report is of the pass before the step that ends it, so its state is a candidate, and good once the next report
    is without serious alarms too; the start is good. Two states of model and optimiser are kept in memory. A scheduler
    that sets the rate anew at each step must be given, so that its own rates are scaled too; trainers' are known.
    """

    def __init__(self, factor: float = 0.5, *, most: int = 3, scheduler: Any = None) -> None:
        if not 0 < factor <= 1 or most < 1:
            raise refusal("a factor within (0, 1] and `most` of at least 1", f"{factor} and {most}")
        self.factor, self.most, self.scheduler = factor, most, scheduler
        self.num_done = 0
        self.last: Kept | None = None
        self.candidate: Kept | None = None

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        if isinstance(host, OwnLoop):  # trainers make their optimiser later
            _optimizer(host)
        if self.last is None and host.optimizer is not None:
            self.last = _kept(model, host.optimizer)

    def good(self, event: Event) -> None:
        self.last = self.candidate or self.last
        self.candidate = _kept(event.model, _optimizer(event.host))

    def __call__(self, event: Event) -> None:
        optimizer = _optimizer(event.host)
        if self.num_done >= self.most:
            event.host.stop()
            return
        self.num_done += 1
        self.candidate = self.last
        if self.last is not None:
            rates = [group["lr"] for group in optimizer.param_groups]
            _put_back(self.last, event.model, optimizer)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        for group in optimizer.param_groups:
            group["lr"] *= self.factor
            if "initial_lr" in group:
                group["initial_lr"] *= self.factor
        scheduler = self.scheduler or event.host.scheduler
        if scheduler is not None:
            scheduler.base_lrs = [rate * self.factor for rate in scheduler.base_lrs]

    def state_dict(self) -> State:
        return {"num_done": self.num_done, "last": self.last, "candidate": self.candidate}

    def load_state_dict(self, state: State) -> None:
        self.num_done, self.last, self.candidate = state["num_done"], state["last"], state.get("candidate")


def _kept(model: nn.Module, optimizer: Optimizer) -> Kept:
    parameters = dict(model.named_parameters())
    in_doubt(parameters.values(), optimizer)  # makes masters known
    masters = {name: master for name, one in parameters.items() if (master := master_of(one)) is not None}
    if any(isinstance(master, DeepSpeed | DeepSpeed3) for master in masters.values()):
        raise refusal("an optimiser whose state can be put back", "DeepSpeed's", REMEDY)
    copies = {name: master.read().clone() for name, master in masters.items()}
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), copies


def _put_back(kept: Kept, model: nn.Module, optimizer: Optimizer) -> None:
    check = RestoreCheck(model.parameters(), optimizer, REMEDY)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(copy.deepcopy(kept[1]))
    for name, value in kept[2].items() if len(kept) > 2 else ():
        write(model.get_parameter(name), value)
    check.begin(optimizer)


def _optimizer(host: Host) -> Optimizer:
    if host.optimizer is None:
        raise refusal("an optimiser to roll back", "none", "pass AttentionMonitor(…, optimizer=…)")
    return host.optimizer


class Attach(Action):
    """A stabiliser at the first alarm, made by `make(model, **options)`: `Attach(QKClip, threshold=50)`.

    The monitor's `optimizer` and `sample` are passed on where `make` takes them and `options` do not have them. Its
    `step()` is called by the monitor's from then on. What acts by a penalty in the loss cannot come in the middle of a
    run like this.
    """

    def __init__(self, make: "Callable[..., Stabiliser]", **options: object) -> None:
        self.make, self.options = make, options
        self.takes = frozenset(inspect.signature(make).parameters)
        self.stabiliser: Stabiliser | None = None
        self.pending: State | None = None

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        """Refuse a model whose heads would not be found: now, and not when the run is in trouble."""
        if "sample" in self.takes and sample is not None:
            self.options.setdefault("sample", sample)
        if "sample" in self.takes and not self.options.keys() & {"sample", "heads", "family"}:
            with within("on_alarm"):
                live.sites(model)

    def __call__(self, event: Event) -> None:
        if self.stabiliser is not None:
            return
        if "optimizer" in self.takes and event.host.optimizer is not None:
            self.options.setdefault("optimizer", event.host.optimizer)
        self.stabiliser = self.make(event.model, **self.options)
        event.attached.append(self.stabiliser)
        if self.stabiliser.parameters():
            if event.host.optimizer is None:
                raise refusal("an optimiser for the stabiliser's parameters", "none", "pass optimizer= to the monitor")
            event.host.optimizer.add_param_group({"params": self.stabiliser.parameters()})
        if self.pending:
            self.stabiliser.load_state_dict(self.pending)

    def state_dict(self) -> State:
        return {} if self.stabiliser is None else {"stabiliser": self.stabiliser.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.pending = state.get("stabiliser")


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

    def all(self) -> list[Action]:
        return [action for actions in self.table.values() for action in actions]

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        for action in self.all():
            action.begin(model, host, sample)

    def __call__(self, event: Event) -> None:
        kinds = {alarm.kind for alarm in event.report.alarms}
        present = kinds - {AHEAD}  # a forecast is acted on only by its own name
        for kind, actions in self.table.items():
            for action in actions:
                if kind in kinds or (not kind and present):
                    action(event)
                elif not present.intersection(SERIOUS):
                    action.good(event)


def _several(entry: object) -> list[object]:
    return list(entry) if isinstance(entry, Iterable) else [entry]


def _action(entry: object) -> Action:
    if isinstance(entry, Action):
        return entry
    if isinstance(entry, type) or not callable(entry):
        raise refusal("an action such as Stop(), Checkpoint(), RollBack(), Attach(…) or a function", repr(entry))
    return Call(entry)
