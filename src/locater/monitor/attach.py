"""A stabiliser that comes at the first alarm, tried at the start on what it will need then."""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import missing, within
from ..models.live import Sample
from ..models.live.tensors import called
from ..models.live.watch import quietly, run
from ..records import State
from .host import Action, Event, Host

if TYPE_CHECKING:
    from ..stabilisers import Stabiliser


class Attach(Action):
    """A stabiliser at the first alarm, made by `make(model, **options)`: `Attach(QKClip, threshold=50)`.

    The monitor's `optimizer` is passed on where `make` takes it, and the batch of the model's first call as `sample`;
    on that batch the stabiliser is tried at the start, and taken off again. Its `step()` is called by the monitor's
    from the alarm on. What acts by a penalty in the loss cannot come in the middle of a run like this.
    """

    def __init__(self, make: "Callable[..., Stabiliser]", **options: Any) -> None:
        self.make, self.options = make, options
        self.name = getattr(make, "__name__", "a stabiliser")
        self.takes = frozenset(inspect.signature(make).parameters)
        self.stabiliser: Stabiliser | None = None
        self.pending: State | None = None
        self.sample: Sample | None = None

    def begin(self, model: nn.Module, host: Host, sample: Sample | None) -> None:
        """Refuse what would fail later: now, and not when the run is in trouble. A resumed run attaches it again."""
        self.sample = sample
        with within("on_alarm"):
            if self.pending is not None:
                self._attach(model, host)
                return
            with torch.random.fork_rng(devices=[]):
                tried = self._make(model, host)
                try:
                    self._check_parameters(tried, host)
                    if sample is not None:
                        with quietly(called(model)), torch.enable_grad():  # in whose passes logits are looked at
                            run(called(model), sample)
                finally:
                    tried.detach()

    def _make(self, model: nn.Module, host: Host) -> "Stabiliser":
        options = dict(self.options)
        if "optimizer" in self.takes and host.optimizers:
            options.setdefault("optimizer", host.optimizers[0] if len(host.optimizers) == 1 else list(host.optimizers))
        if "sample" in self.takes and self.sample is not None and not options.keys() & {"heads", "family"}:
            options.setdefault("sample", self.sample)
        return self.make(model, **options)

    def _check_parameters(self, stabiliser: "Stabiliser", host: Host) -> None:
        if stabiliser.parameters() and not host.optimizers:
            raise missing("an optimiser for the stabiliser's parameters", "pass optimizer= to the monitor")

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
        self._attach(event.model, event.host)
        assert self.stabiliser is not None
        event.attached.append(self.stabiliser)
        event.say(f"attached {self.name}, because of {event.reason}; the weights are as they were")

    def end(self) -> None:
        self.sample = None

    def state_dict(self) -> State:
        return {} if self.stabiliser is None else {"stabiliser": self.stabiliser.state_dict()}

    def load_state_dict(self, state: State) -> None:
        self.pending = state.get("stabiliser")


def _for_vectors(optimizers: Sequence[Optimizer]) -> Optimizer:
    """The last that takes parameters of one dimension: Muon does not."""
    return next((one for one in reversed(optimizers) if "ns_steps" not in one.param_groups[-1]), optimizers[-1])
