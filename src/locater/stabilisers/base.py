"""What every stabiliser offers a training loop: `penalty()` in the loss, `step()` after the optimiser's, `detach()`.

Each method of the base does nothing, so that one loop serves all of them.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import refusal
from ..records import State


class Stabiliser:
    """Made from a model, it is attached; `detach()` leaves the model as if it had never been."""

    # Whether `penalty()` is of the passes since its last call, so that the backward of each pass must have its own.
    of_passes = False

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

    def state_dict(self) -> State:
        """What a resumed run needs beside the model's own state."""
        return {}

    def load_state_dict(self, state: State) -> None:
        if state:
            raise refusal("an empty state", ", ".join(state))

    def detach(self) -> None:
        """Leave the model's outputs and the keys of its `state_dict` as they would be without the stabiliser."""


def non_negative(value: float, what: str) -> float:
    """Refuses what is negative, infinite or not a number."""
    if not 0 <= value < float("inf"):
        raise refusal(f"a {what} of at least 0", value)
    return float(value)


class Rates:
    """What an optimiser says of each of its parameters now: the learning rate, and the mean square of the gradients."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
        self.state = optimizer.state

    def learning_rate(self, parameter: Tensor, name: str) -> float:
        """Refuses an optimiser that does not own the parameter."""
        if id(parameter) not in self.groups:
            remedy = "pass the optimiser that trains this model, made after the model was sharded or wrapped"
            raise refusal(f"an optimiser that owns `{name}`", "one that does not", remedy)
        return float(self.groups[id(parameter)]["lr"])

    def is_orthogonalised(self, parameter: Tensor) -> bool:
        """Whether the optimiser makes steps of one size, whatever the gradient's: Muon."""
        return "ns_steps" in self.groups.get(id(parameter), {})

    def second_moment(self, parameter: Tensor) -> tuple[Tensor, float] | None:
        """Adam's running mean of the squared gradient and what to multiply it by, since it starts at 0.

        None where the optimiser keeps none, or has not stepped yet.
        """
        state = self.state.get(parameter, {})
        if "exp_avg_sq" not in state:
            return None
        decay = self.groups[id(parameter)].get("betas", (0.0, 0.0))[1]
        return state["exp_avg_sq"], 1 / (1 - decay ** float(state["step"]))
