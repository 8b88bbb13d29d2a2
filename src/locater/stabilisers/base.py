"""What every stabiliser offers a training loop: `penalty()` in the loss, `step()` after the optimiser's, `detach()`.

Each method of the base does nothing, so that one loop serves all of them.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import refusal


class Stabiliser:
    """Made from a model, it is attached; `detach()` leaves the model as if it had never been."""

    def penalty(self) -> Float[Tensor, ""]:
        """What to add to the loss."""
        return torch.zeros(())

    def step(self) -> None:
        """What to do after `optimizer.step()`."""

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        """A bounded number of scalars for a logger: one per layer, or with `heads` one per head."""
        return {}

    def parameters(self) -> list[nn.Parameter]:
        """Further parameters that the optimiser must be given."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the model's own state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise refusal("an empty state", ", ".join(state))

    def detach(self) -> None:
        """Leave the model's outputs and the keys of its `state_dict` as they would be without the stabiliser."""


def non_negative(value: float, what: str) -> float:
    """Refuses what is negative, infinite or not a number."""
    if not 0 <= value < float("inf"):
        raise refusal(f"a {what} of at least 0", value)
    return float(value)


def learning_rates(optimizer: Optimizer) -> dict[int, float]:
    """The learning rate of each parameter, by its id."""
    return {id(parameter): float(group["lr"]) for group in optimizer.param_groups for parameter in group["params"]}


def learning_rate(rates: dict[int, float], parameter: Tensor, name: str) -> float:
    """The rate of one parameter; refuses an optimiser that does not own it."""
    if id(parameter) not in rates:
        remedy = "pass the optimiser that trains this model, made after the model was sharded or wrapped"
        raise refusal(f"an optimiser that owns `{name}`", "one that does not", remedy)
    return rates[id(parameter)]
