"""`strength="auto"`: κ by which LocAteR has, in the first steps, a stated share of the gradient by queries and keys."""

import math
from statistics import median_low

from ..errors import refusal
from ..records import State

SHARE = 1 / 10  # of the two gradients' sizes together, for the median group of heads
STEPS = 5  # that κ is chosen from


class Auto:
    """κ = share/(1 − share) · ‖∇loss‖/‖∇scale‖, the median over the steps so far; fixed after STEPS of them.

    It acts from the second step on, since runs that diverge do so early. A median, since in such a run one wild step
    has a ratio a hundred times off. Steps without a gradient (output projections that start at 0) are passed over.
    """

    def __init__(self, share: float = SHARE) -> None:
        if not 0 < share < 1:
            raise refusal("a share of the gradient between 0 and 1", share)
        self.share, self.ratios = share, list[float]()

    def add(self, ratio: float) -> None:
        """‖∇loss‖/‖∇scale‖ of one more step; 0 where the loss has no gradient yet."""
        if ratio > 0 and math.isfinite(ratio):
            self.ratios.append(ratio)

    @property
    def strength(self) -> float:
        return self.share / (1 - self.share) * median_low(self.ratios) if self.ratios else 0.0

    @property
    def is_done(self) -> bool:
        return len(self.ratios) >= STEPS

    def state_dict(self) -> State:
        return {"ratios": list(self.ratios)}

    def load_state_dict(self, state: State) -> None:
        self.ratios = [float(ratio) for ratio in state["ratios"]]
