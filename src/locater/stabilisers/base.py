"""Interface of every stabiliser: `penalty()` in the loss, `step()` after the optimiser's, `detach()`.

Each method of the base does nothing, so that one loop serves all of them.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import refusal
from ..models.live import is_known
from ..models.live.tensors import entry_of
from ..models.live.watch import FirstCall, Sample
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
