"""`strength="auto"`: κ by which LocAteR has, in the first steps, a stated share of the gradient by queries and keys."""

import math
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..errors import missing, refusal
from ..models.live.write_check import Optimizers, inner_optimizer, several
from ..records import State
from .live.pairs import Pair

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


Slopes = Callable[[int], list[Tensor]]


class Gauge:
    """‖∇loss‖ / ‖∇scale‖ for each group of heads, the median over groups, once in every step.

    In the loss, parameters are listened to as their gradients arrive, before anyone clips them; what the penalty itself
    has put there, and the factor of a loss scaler, are taken out again. Decoupled, they are read when the optimiser has
    stepped: a closure may make them within the step. The scale's gradient is that of the weights before it: in a run
    without warm-up the first step alone can make ‖∇η²‖ twenty times as large. Holds one copy of both. Computed weights
    (LoRA) are compared by the parameters that they are made from. `slopes` gives the scale's gradient by the leaves of
    a pair.
    """

    def __init__(self, pairs: Sequence[Pair], optimizer: Optimizers | None, slopes: Slopes) -> None:
        self.pairs, self.slopes = pairs, slopes
        self.seen: dict[int, Tensor] = {}
        self.of_scale: dict[int, list[Tensor]] = {}
        self.strength, self.factor = 0.0, 0.0
        leaves = {id(one): one for pair in pairs for one in pair.leaves().values()}
        if optimizer is None:
            self.handles: list[Any] = [one.register_post_accumulate_grad_hook(self._note) for one in leaves.values()]
        else:
            self.leaves = list(leaves.values())
            inner = [innermost(one) for one in several(optimizer)]
            self.handles = [one.register_step_pre_hook(self._before) for one in inner]
            self.handles += [one.register_step_post_hook(self._after) for one in inner]
            self._note_scale()  # for a step that has begun already

    def _before(self, *given: object) -> None:
        """Note the scale's gradient as the first of the optimisers steps, before any weight has moved."""
        if not self.seen:
            self._note_scale()

    def _after(self, *given: object) -> None:
        for one in self.leaves:
            if id(one) not in self.seen:
                self._note(one)

    def _note_scale(self) -> None:
        self.of_scale = {number: self.slopes(number) for number in range(len(self.pairs))}

    def _note(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.seen[id(parameter)] = parameter.grad.detach().clone()

    def listen(self, value: Tensor, strength: float) -> None:
        """Told of a penalty of that strength, which goes into the loss."""
        self._note_scale()
        self.strength = strength
        value.register_hook(self._scaled)

    def _scaled(self, by_value: Tensor) -> None:
        self.factor += float(by_value)

    def read(self) -> float:
        """The ratio of this step; 0 where the loss has no gradient by queries and keys, refused where none came."""
        ratios = []
        for number, pair in enumerate(self.pairs):
            known = [self.seen.get(id(one)) for one in pair.leaves().values()]
            if number not in self.of_scale or any(one is None for one in known):
                continue
            of_loss = [one / (self.factor or 1.0) for one in known if one is not None]
            of_scale = self.of_scale[number]
            if self.strength:
                of_loss = [one - self.strength * by for one, by in zip(of_loss, of_scale, strict=True)]
            ratios.append(pair.squares(of_loss) / pair.squares(of_scale))
        self.seen, self.of_scale, self.strength, self.factor = {}, {}, 0.0, 0.0
        return _agreed(ratios)

    def close(self) -> None:
        while self.handles:
            self.handles.pop().remove()


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimiser that steps, for its hooks."""
    inner = inner_optimizer(optimizer)
    if inner is None:
        remedy = "give the optimiser inside of it, or a number as the strength"
        raise refusal('an optimiser with hooks, for strength="auto"', type(optimizer).__name__, remedy)
    return inner


def _agreed(ratios: list[Tensor]) -> float:
    """√ of the median over all groups; the geometric mean over processes, which have seen other texts."""
    if not ratios:
        remedy = "call step() after backward(), or give a number"
        raise missing('gradients of queries and keys for strength="auto" to go by', remedy)
    known = torch.cat(ratios).double()
    known = known[torch.isfinite(known) & (known > 0)]
    found = known.log().median() / 2 if len(known) else known.new_tensor(-math.inf)
    if dist.is_initialized():
        dist.all_reduce(found)
        found = found / dist.get_world_size()
    return math.exp(float(found))
