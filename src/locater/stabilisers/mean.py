"""The mean of the eigenspectrum: at what tr W of every head is held, and how. Objects that LocAteR is given.

Targets are of tr W in units of λ, the number that logits are divided by: the border of late and middle is 2.
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol, runtime_checkable

import torch

from ..errors import Refusal, refusal, within
from .live.pairs import Pair, PerHead
from .live.sharding import HeadShard, product_sums
from .scales import Scale, TraceNear

WARM_UP = 100  # steps that a mean given as a number has to get there


@runtime_checkable
class Target(Protocol):
    """The wanted tr W / λ of every head after a number of steps, given what it was at the start; None: none now."""

    def at(self, step: int, initial: PerHead) -> PerHead | None: ...


@dataclass(frozen=True)
class Constant:
    """One number for every head."""

    value: float

    def at(self, step: int, initial: PerHead) -> PerHead:
        return torch.full_like(initial, self.value)


@dataclass(frozen=True)
class Initial:
    """Target: tr W of each head when LocAteR was made; near zero for a random initialisation."""

    def at(self, step: int, initial: PerHead) -> PerHead:
        return initial


@dataclass(frozen=True)
class WarmUp:
    """From what each head had, in a straight line to `value` within `steps` calls of `step()`."""

    value: float
    steps: int = WARM_UP

    def __post_init__(self):
        if self.steps < 1:
            raise refusal("a warm-up of at least one step", self.steps)

    def at(self, step: int, initial: PerHead) -> PerHead:
        share = min(step / self.steps, 1.0)
        return (1 - share) * initial + share * self.value


@dataclass(frozen=True)
class Until:
    """Another target for `steps` calls of `step()`, then none: the mean is released."""

    target: Target
    steps: int

    def __post_init__(self):
        if self.steps < 1:
            raise refusal("a mean that is held for at least one step", self.steps)

    def at(self, step: int, initial: PerHead) -> PerHead | None:
        return self.target.at(step, initial) if step <= self.steps else None


class Mean:
    """Rule for the mean of the eigenvalues. Neither method does anything unless a kind of mean says so."""

    target: Target | None = None

    def term(self, target: PerHead, temperature: float) -> Scale | None:
        """Term of the penalty for a target of tr W itself."""
        return None

    def restore(self, pair: Pair, target: PerHead) -> None:
        """Restore the mean in the weights after a step."""


class Free(Mean):
    """The mean goes where the loss takes it."""


@dataclass(frozen=True)
class Penalised(Mean):
    """weight · Σ_heads ((tr W − τ)/λ)² beside the scale: the mean gives way where the loss insists."""

    weight: float
    target: Target = Initial()  # type: ignore  # narrower than that of a mean that may be free

    def __post_init__(self):
        if not 0 <= self.weight < math.inf:
            raise refusal("a weight of the mean penalty of at least 0", self.weight)

    def term(self, target: PerHead, temperature: float) -> Scale | None:
        return TraceNear(self.weight / temperature**2, target) if self.weight else None


@dataclass(frozen=True)
class Projected(Mean):
    """tr W = τ exactly, restored by `step()` after every step of the optimiser."""

    target: Target = Initial()  # type: ignore  # narrower than that of a mean that may be free

    def restore(self, pair: Pair, target: PerHead) -> None:
        if not pair.is_stored:
            got = f"computed ones in {pair.name}"
            raise refusal("plain parameters to project", got, "hold the mean by Penalised(…)")
        shard = pair.shard(exact=True)
        hold_trace(shard, target[shard.groups])
        shard.commit()


def as_mean(mean: Mean | float | str | None) -> Mean:
    """None or "free", "initial", or a number, which stands for `Projected(WarmUp(number))`; refuses what is no mean.

    >>> as_mean(3.5)
    Projected(target=WarmUp(value=3.5, steps=100))
    """
    if isinstance(mean, Mean):
        return mean
    if mean is None or mean == "free":
        return Free()
    if mean == "initial":
        return Projected(Initial())
    if isinstance(mean, Real) and not isinstance(mean, bool) and math.isfinite(mean):
        return Projected(WarmUp(float(mean)))
    remedy = "or an object: Projected(target), Penalised(weight, target)"
    raise refusal('a mean that is a finite number, "initial" or "free"', repr(mean), remedy)


def hold_trace(shard: HeadShard, target: PerHead) -> None:
    """Move tr W of the local heads to the target, by the smallest multiple a of each other's weights.

    W_Q += a W_K, W_K += a W_Q. If both are trained, a² tr W + a (‖W_Q‖² + ‖W_K‖²) + tr W − τ = 0; if one is, a =
    (τ − tr W)/‖the other‖². Keys of a group, which belong to several heads, stay. Cost: a few passes over the weights.
    Refuses a target out of reach.
    """
    moves_query, moves_key = shard.moves[0], shard.moves[1] and shard.rows[0].num_heads == 1
    if not (moves_query or moves_key):
        raise Refusal(f"{shard.name}: a frozen query with a key of several heads cannot hold each one's trace")
    present, length = _measure(shard, moves_query, moves_key)
    missing = target.to(present) - present
    multiple = smaller_root(present, length, -missing) if moves_query and moves_key else missing / length
    multiple = multiple.where(missing != 0, 0)
    with within(shard.name):
        _check(multiple, present, target)
    multiple = multiple[..., None, None].to(shard.query)
    by_query = multiple * shard.key if moves_query else None
    if moves_key:
        shard.key.add_(multiple * shard.query)
    if by_query is not None:
        shard.query.add_(by_query)


def smaller_root(quadratic: PerHead, linear: PerHead, constant: PerHead) -> PerHead:
    """The root smaller in magnitude of A a² + B a + C = 0 with B > 0, without cancellation; NaN where none is real."""
    return -2 * constant / (linear + (linear.square() - 4 * quadratic * constant).sqrt())


def _measure(shard: HeadShard, moves_query: bool, moves_key: bool) -> tuple[PerHead, PerHead]:
    """tr W, and the squared length of the directions that count; one message for both."""
    present = product_sums(shard.query, shard.key)
    length = moves_query * product_sums(shard.key, shard.key) + moves_key * product_sums(shard.query, shard.query)
    present, length = shard.complete_sums(torch.stack(torch.broadcast_tensors(present, length))).unbind(0)
    return present, length


def _check(multiple: PerHead, present: PerHead, target: PerHead) -> None:
    if bool(torch.isfinite(multiple).all()):
        return
    worst = int((~torch.isfinite(multiple)).flatten().nonzero()[0])
    now, wanted = float(present.flatten()[worst]), float(target.flatten()[worst])
    if now != now:
        raise refusal("finite weights", "NaN", "the run has diverged: go back to a checkpoint")
    remedy = "choose a nearer target, a WarmUp, or start from SpectralInitialisation"
    raise refusal("a target of tr W within reach", f"{wanted:.4g} where tr W = {now:.4g}", remedy)
