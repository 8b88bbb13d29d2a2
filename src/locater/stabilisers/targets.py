"""How the mean of the eigenspectrum is held, and at what: objects that LocAteR is given.

Targets are of tr W in units of λ, the number that logits are divided by: the border of late and middle is 2.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal


@runtime_checkable
class Target(Protocol):
    """The wanted tr W / λ of every head after a number of steps, given what it was at the start; None: none now."""

    def at(self, step: int, initial: Float[Tensor, "groups heads"]) -> Float[Tensor, "groups heads"] | None: ...


@dataclass(frozen=True)
class Constant:
    """One number for every head."""

    value: float

    def at(self, step: int, initial: Float[Tensor, "groups heads"]) -> Float[Tensor, "groups heads"]:
        return torch.full_like(initial, self.value)


@dataclass(frozen=True)
class Initial:
    """What each head had when LocAteR was made; near zero for a random initialisation."""

    def at(self, step: int, initial: Float[Tensor, "groups heads"]) -> Float[Tensor, "groups heads"]:
        return initial


@dataclass(frozen=True)
class WarmUp:
    """From what each head had, in a straight line to `value` within `steps` calls of `step()`."""

    value: float
    steps: int

    def __post_init__(self):
        if self.steps < 1:
            raise refusal("a warm-up of at least one step", self.steps)

    def at(self, step: int, initial: Float[Tensor, "groups heads"]) -> Float[Tensor, "groups heads"]:
        share = min(step / self.steps, 1.0)
        return (1 - share) * initial + share * self.value


@dataclass(frozen=True)
class Until:
    """Another target for `steps` calls of `step()`, then none: the mean is let go."""

    target: Target
    steps: int

    def __post_init__(self):
        if self.steps < 1:
            raise refusal("a mean that is held for at least one step", self.steps)

    def at(self, step: int, initial: Float[Tensor, "groups heads"]) -> Float[Tensor, "groups heads"] | None:
        return self.target.at(step, initial) if step <= self.steps else None


@dataclass(frozen=True)
class Free:
    """The mean goes where the loss takes it."""

    target: Target | None = None


@dataclass(frozen=True)
class Penalty:
    """weight · Σ_heads ((tr W − τ)/λ)² beside the scale: the mean gives way where the loss insists."""

    weight: float
    target: Target = Initial()

    def __post_init__(self):
        if not 0 <= self.weight < float("inf"):
            raise refusal("a weight of the mean penalty of at least 0", self.weight)


@dataclass(frozen=True)
class Projection:
    """tr W = τ exactly, restored by `step()` after every step of the optimiser."""

    target: Target = Initial()


Mean = Free | Penalty | Projection
