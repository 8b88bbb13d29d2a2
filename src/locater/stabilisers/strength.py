"""`strength="auto"`: κ by which LocAteR has, in the first steps, a stated share of the gradient by queries and keys."""

import math

from ..records import State

SHARE = 1 / 3  # of the two gradients' sizes together, for the median group of heads
STEPS = 5  # that κ is chosen from


class Auto:
    """κ = SHARE/(1 − SHARE) · ‖∇loss‖/‖∇scale‖, the geometric mean over the steps so far; fixed after STEPS of them.

    It acts from the second step on, since runs that diverge do so early, and its own part of the gradient is taken out
    before the loss's is measured.
    """

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, ratio: float) -> None:
        """‖∇loss‖/‖∇scale‖ of one more step."""
        self.total, self.count = self.total + math.log(ratio), self.count + 1

    @property
    def strength(self) -> float:
        return SHARE / (1 - SHARE) * math.exp(self.total / self.count) if self.count else 0.0

    @property
    def is_done(self) -> bool:
        return self.count >= STEPS

    def state_dict(self) -> State:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: State) -> None:
        self.total, self.count = float(state["total"]), int(state["count"])
