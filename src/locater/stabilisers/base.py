"""Interface of every stabiliser: `penalty()` in the loss, `step()` after the optimiser's, `detach()`.

Each method of the base does nothing, so that one loop serves all of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import refusal
from ..models.live import is_known
from ..models.live.masters import DeepSpeed, DeepSpeed3, master_of
from ..models.live.rate_factor import current_factor
from ..models.live.tensors import entry_of
from ..models.live.watch import FirstCall, Sample
from ..models.live.write_check import Optimizers, several
from ..records import State

_Kind = TypeVar("_Kind", bound="Stabiliser")
Find = Callable[[Sample | None], None]  # on a batch, if that is needed


class Stabiliser:
    """Made from a model, it is attached; `detach()`, or the end of `with`, leaves the model as if it had never been.

    The heads of a model that no table knows are found at its first call, on that batch, unless a `sample` was given:
    until then the stabiliser is `waiting`.
    """

    waiting: FirstCall | None = None
    pending: State | None = None  # a state that was loaded while waiting

    # Whether `penalty()` is of the passes since its last call, so that the backward of each pass must have its own.
    of_passes = False

    def penalty(self) -> Float[Tensor, ""]:
        """Term to add to the loss."""
        return torch.zeros(())

    def step(self) -> None:
        """Update the weights after `optimizer.step()`."""

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        """A bounded number of scalars for a logger: one per layer, or with `heads` one per head."""
        return {}

    def parameters(self) -> list[nn.Parameter]:
        """Further parameters that the optimiser must be given."""
        return []

    def state_dict(self) -> State:
        """State that a resumed run needs besides the model's own."""
        return {}

    def load_state_dict(self, state: State) -> None:
        if state:
            raise refusal("an empty state", ", ".join(state))

    def begin(self, model: nn.Module, find: Find, sample: Sample | None, *known: object) -> None:
        """Find the heads now where `sample`, the tables or what is `known` of them allow it, else at the first call."""
        if sample is not None or any(known) or is_known(model):
            find(sample)
        else:
            self.waiting = FirstCall(entry_of(model), partial(self._begin_waiting, find))

    def _begin_waiting(self, find: Find, sample: Sample) -> None:
        self.waiting = None
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            find(sample)
        if self.pending is not None:
            self.load_state_dict(self.pending)

    def check_found(self, what: str) -> None:
        """Refuse to act before the heads are found: a model that is called past its hooks would never be held."""
        if self.waiting is not None:
            remedy = "call the model itself, model(batch), first; or give a batch by sample=…"
            raise refusal(f"heads found in the model's first call, for {what}", "no call so far", remedy)

    def __enter__(self: _Kind) -> _Kind:
        return self

    def __exit__(self, *given: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Leave the model's outputs and the keys of its `state_dict` as they would be without the stabiliser."""
        if self.waiting is not None:
            self.waiting.close()
            self.waiting = None


def non_negative(value: float, what: str) -> float:
    """Refuses what is negative, infinite or not a number."""
    if not 0 <= value < float("inf"):
        raise refusal(f"a {what} of at least 0", value)
    return float(value)


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
