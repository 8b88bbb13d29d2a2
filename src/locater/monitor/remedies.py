"""Two remedies that come at an alarm: the last good state with a lower learning rate, and a stabiliser."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import counted, missing, refusal, within
from ..models.live.rate_factor import factor_on, rates, release_factor
from ..models.live.tensors import called
from ..models.live.watch import Sample, quietly, run_sample
from ..models.live.write_check import Idle
from ..records import State
from .actions import Action, Event, Host
from .kept import Kept, keep, put_back

if TYPE_CHECKING:
    from ..stabilisers import Stabiliser


class RollBack(Action):
    """Back to the last good state, with `factor` times the learning rate, at most `most` times; `then` what to do.

    A report is of the pass before the step that ends it, so its state is a candidate, and good once the next report
    is without serious alarms too; the start is good. Two states of model, optimisers and whatever else the monitor was
    given are kept in memory. Schedules go on where they are; from then on each step is taken with `factor` times the
    rate that the schedule says, whatever scheduler that is: see `models.live.rate_factor`.
    """

    def __init__(self, factor: float = 0.5, *, most: int = 3, then: Action | None = None) -> None:
        if not 0 < factor <= 1 or most < 1:
            raise refusal("a factor within (0, 1] and `most` of at least 1", f"{factor} and {most}")
        if then is not None and not isinstance(then, Action):
            raise refusal("as `then` an action such as Stop()", repr(then))
        self.factor, self.most, self.then = factor, most, then
        self.rate, self.num_done = 1.0, 0
        self.last: Kept | None = None
        self.candidate: Kept | None = None
        self.optimizers: list[Optimizer] = []
        self.idle = Idle(())
        self.undone: list[str] = []
        self.was_told = False

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        if not host.optimizers:
            raise missing("an optimiser to roll back", "pass AttentionMonitor(…, optimizer=…)")
        self.resume(host)
        self.last = self.last or keep(None, model, host)
        if self.then is not None:
            self.then.begin(model, host, sample)

    def resume(self, host: Host) -> None:
        """Put the factor on every optimiser."""
        if self.optimizers != list(host.optimizers):
            self.idle.close()
            self.optimizers, self.idle = list(host.optimizers), Idle(host.optimizers)
        for optimizer in self.optimizers:
            factor_on(optimizer).parts[id(self)] = self.rate

    def good(self, event: Event) -> None:
        self.last = self.candidate or self.last
        self.candidate = keep(event.report.step, event.model, event.host)

    def __call__(self, event: Event) -> None:
        if self.last is None:
            self.last = keep(event.report.step, event.model, event.host)
        if self.num_done >= self.most:
            self._give_up(event, f"{counted(self.num_done, 'time')} did not end it")
            return
        if not _all_finite(self.last["model"].values()):
            self._give_up(event, "the weights were not finite at the start; load a checkpoint from before")
            return
        before = rates(event.host.optimizers)
        put_back(self.last, event.model, event.host, self.undone.append)
        self.num_done, self.candidate = self.num_done + 1, self.last
        self.rate *= self.factor
        self.resume(event.host)
        now = rates(event.host.optimizers)
        words = ", ".join(f"{a:.3g} to {b:.3g}" for a, b in zip(before, now, strict=True))
        where = "at the start" if self.last["step"] is None else f"after step {self.last['step']}"
        event.say(
            f"rolled back to the state {where}, because of {event.reason}; {self.rate:g} times the scheduled learning "
            f"rate from now on ({words}), {self.num_done} of {self.most}"
        )

    def _give_up(self, event: Event, why: str) -> None:
        if not self.was_told:
            remedy = "" if self.then is not None else "; then=Stop() would end the run"
            event.say(f"not rolled back, in spite of {event.reason}: {why}{remedy}")
        if self.then is not None:
            self.then(event)
        self.was_told = True

    def check(self, host: Host) -> str | None:
        """Do the optimisers step, with the factor, and did the weights stay where they were put?"""
        reasons, self.undone = self.undone, []
        for number, optimizer in enumerate(self.optimizers):
            factor = factor_on(optimizer)
            if factor.was_undone and not factor.was_told:
                factor.was_told = True
                kind = f"optimiser {number} ({type(optimizer).__name__})"
                reasons.append(f"{kind} sets its learning rate within its step")
        reasons += [words] if (words := self.idle.check()) else []
        return f"RollBack does not hold: {'; '.join(reasons)}" if reasons else None

    def end(self) -> None:
        for optimizer in self.optimizers:
            release_factor(optimizer, self)
        self.idle.close()
        self.optimizers = []

    def state_dict(self) -> State:
        state: State = {"num_done": self.num_done, "rate": self.rate, "last": self.last, "candidate": self.candidate}
        state |= {"was_told": self.was_told}
        return state | ({"then": self.then.state_dict()} if self.then is not None else {})

    def load_state_dict(self, state: State) -> None:
        self.num_done, self.rate = state["num_done"], state["rate"]
        self.last, self.candidate, self.was_told = state["last"], state["candidate"], state.get("was_told", False)
        if self.then is not None:
            self.then.load_state_dict(state.get("then", {}))
        for optimizer in self.optimizers:
            factor_on(optimizer).parts[id(self)] = self.rate


class Attach(Action):
    """A stabiliser at the first alarm, made by `make(model, **options)`: `Attach(QKClip, threshold=50)`.

    The monitor's `optimizer` is passed on where `make` takes it, and the batch of the model's first call as `sample`;
    on that batch the stabiliser is tried at the start, and taken off again. Its `step()` is called by the monitor's
    from the alarm on. What acts by a penalty in the loss cannot come in the middle of a run like this.
    """

    def __init__(self, make: "Callable[..., Stabiliser]", **options: Any) -> None:
        if not callable(make):
            raise refusal("what makes a stabiliser, such as Attach(QKClip, threshold=50)", repr(make))
        self.make, self.options = make, options
        self.name = getattr(make, "__name__", "a stabiliser")
        signature = inspect.signature(make)
        signature.bind_partial(**options)  # names that it does not take fail here, as a call would
        self.takes = frozenset(signature.parameters)
        self.stabiliser: Stabiliser | None = None
        self.pending: State | None = None
        self.sample: Sample | None = None
        self.was_told = False

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        """Refuse what would fail later: now, and not when the run is in trouble. A resumed run attaches it again."""
        self.sample = sample
        with within("on_alarm"):
            if self.pending is not None:
                self._attach(model, host)
                return
            if not _all_finite(model.parameters()):  # nothing can be tried on such weights; at an alarm it is said
                return
            with torch.random.fork_rng(devices=[]):
                tried = self._make(model, host)
                try:
                    self._check_parameters(tried, host)
                    if sample is not None:
                        with quietly(called(model)), torch.enable_grad():  # in whose passes logits are looked at
                            run_sample(called(model), sample)
                            self._check_penalty(tried)
                finally:
                    tried.detach()

    def _make(self, model: nn.Module, host: Host) -> "Stabiliser":
        options = dict(self.options)
        if "optimizer" in self.takes and host.optimizers:
            options.setdefault("optimizer", host.optimizers[0] if len(host.optimizers) == 1 else list(host.optimizers))
        if "sample" in self.takes and self.sample is not None and "heads" not in options:
            options.setdefault("sample", self.sample)
        return self.make(model, **options)

    def _check_parameters(self, stabiliser: "Stabiliser", host: Host) -> None:
        if stabiliser.parameters() and not host.optimizers:
            raise missing("an optimiser for the stabiliser's parameters", "pass optimizer= to the monitor")

    def _check_penalty(self, stabiliser: "Stabiliser") -> None:
        """Refuse what acts by the loss, which the training would have to take from here."""
        if stabiliser.penalty().requires_grad:
            kinds = "a stabiliser that acts by step() or in the forward pass"
            remedy = "pass optimizer= to the monitor if it can act by that, or add penalty() to the loss from the start"
            raise refusal(kinds, f"{self.name}, which acts by penalty()", remedy)

    def _attach(self, model: nn.Module, host: Host) -> None:
        self.stabiliser = self._make(model, host)
        if parameters := self.stabiliser.parameters():
            self._check_parameters(self.stabiliser, host)
            # Into a group that is there: schedulers count the groups when they are made, and fail over another.
            _for_vectors(host.optimizers).param_groups[-1]["params"].extend(parameters)
        if self.pending:
            self.stabiliser.load_state_dict(self.pending)
        self.pending = None

    def __call__(self, event: Event) -> None:
        if self.stabiliser is not None:
            return
        if not _all_finite(event.model.parameters()):
            if not self.was_told:
                remedy = "go back to a checkpoint, or act by RollBack"
                event.say(f"not attached {self.name}: the weights are not finite, and none mends that; {remedy}")
            self.was_told = True
            return
        self._attach(event.model, event.host)
        assert self.stabiliser is not None
        event.attached.append(self.stabiliser)
        event.say(f"attached {self.name}, because of {event.reason}; the weights are as they were")

    def end(self) -> None:
        self.sample = None

    def state_dict(self) -> State:
        state: State = {"was_told": self.was_told}
        return state if self.stabiliser is None else state | {"stabiliser": self.stabiliser.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.pending, self.was_told = state.get("stabiliser"), state.get("was_told", False)


def _all_finite(tensors: Iterable[Any]) -> bool:
    return all(bool(one.isfinite().all()) for one in tensors if isinstance(one, torch.Tensor))


def _for_vectors(optimizers: Sequence[Optimizer]) -> Optimizer:
    """The last that takes parameters of one dimension: Muon does not."""
    return next((one for one in reversed(optimizers) if "ns_steps" not in one.param_groups[-1]), optimizers[-1])
