"""The learning rate as a pure function of the step, so that nothing of it needs to be saved."""

import math

from .config import OptimiserOptions


def learning_rate(step: int, options: OptimiserOptions, *, num_steps: int) -> float:
    """Linear from 0 over the warm-up, then ∝ 1/√step, a half cosine down to the final share, or constant.

    Steps count from 0, and the first one moves already: its rate is 1/warm-up of the highest.
    """
    highest, warmup = options.learning_rate, options.warmup
    if step < warmup:
        return highest * (step + 1) / warmup
    match options.schedule:
        case "inverse-sqrt":
            return highest * math.sqrt(max(1, warmup) / (step + 1))
        case "cosine":
            progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
            share = options.final_share
            return highest * (share + (1 - share) * (1 + math.cos(math.pi * progress)) / 2)
    return highest
