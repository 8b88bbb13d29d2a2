"""One block of keys folded into running sums relative to a running maximum: the arithmetic of `streaming`.

Plain functions of tensors, so that `torch.compile` can fuse them; the sums are one tensor, so that few calls move them.
Logits are in units of log 2 throughout: 2^x stays quick where it underflows, e^x becomes up to eighty times slower.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Finite, so that 2^(masked − max) · (masked − max) is 0 and not NaN; sums of it over any real text stay finite too.
MASKED = -1e30
UNIT = math.log(2)

TOTAL, SHIFTED, SQUARE, DISTANCE, CLOSE, FIRST = range(6)

Grouped = Float[Tensor, "batch groups ratio queries d_head"]


class Running(NamedTuple):
    """The largest logit so far, and sums over the keys seen with e = 2^(ω − maximum):

    Σ e, Σ e (ω − maximum), Σ e², Σ e |i − j|, Σ e over near keys, e of the first token.
    """

    maximum: Float[Tensor, "batch groups ratio queries"]
    sums: Float[Tensor, "6 batch groups ratio queries"]


class Room:
    """Memory for the logits and exponentials of one block, used again for the next: fresh pages cost more than sums."""

    def __init__(self) -> None:
        self.flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Whatever was there before is gone."""
        number = math.prod(shape)
        if name not in self.flat or self.flat[name].numel() < number:
            self.flat[name] = like.new_empty(number)
        return self.flat[name][:number].view(*shape)


class Block(NamedTuple):
    """What a block of keys brings besides their vectors; None where it does not matter."""

    admitted: Bool[Tensor, "batch groups ratio queries keys"] | None
    bias: Float[Tensor, "batch groups ratio queries keys"] | None
    first: Int[Tensor, "batch queries"] | None  # where in the block each query's first token is, if it is
    score: Callable[[Tensor], Tensor] | None = None  # what becomes of the logits before the mask
    room: Room | None = None  # none where the compiler sees to that


def start(queries: Grouped) -> Running:
    """Nothing seen yet."""
    shape = queries.shape[:-1]
    return Running(queries.new_full(shape, MASKED), queries.new_zeros(6, *shape))


def absorb_far(
    running: Running,
    queries: Grouped,
    keys: Float[Tensor, "batch groups keys d_head"],
    block: Block,
    softcap: float | None,
    offset: Float[Tensor, "#batch queries"],
    inner: Float[Tensor, "#batch keys"],
) -> Running:
    """A block all on one side and not near: |i − j| = offset_i + inner_j, so two columns of a product give its sums."""
    e, shifted, maximum = _exponentials(running, _logits(queries, keys, block, softcap), block.room)
    total, within = _two_sums(e, inner)
    distance = torch.addcmul(within, total, offset[:, None, None])
    return _add(running, maximum, e, shifted, block, total=total, distance=distance, close=torch.zeros_like(total))


def _two_sums(e: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Σ e and Σ e · inner: compiled as part of one loop over e, else as one thin product."""
    if torch.compiler.is_compiling():
        return e.sum(-1), (e * inner[:, None, None, None]).sum(-1)
    columns = torch.stack([torch.ones_like(inner), inner], -1)
    total, within = (e @ (columns[0] if len(columns) == 1 else columns[:, None, None])).unbind(-1)
    return total, within


def absorb_near(
    running: Running,
    queries: Grouped,
    keys: Float[Tensor, "batch groups keys d_head"],
    block: Block,
    softcap: float | None,
    distance: Float[Tensor, "#batch queries keys"],
    near: int,
) -> Running:
    """Any block: distances one by one."""
    e, shifted, maximum = _exponentials(running, _logits(queries, keys, block, softcap), block.room)
    distance = distance[:, None, None]
    within, close = (e * distance).sum(-1), (e * (distance < near)).sum(-1)
    return _add(running, maximum, e, shifted, block, total=e.sum(-1), distance=within, close=close)


def _logits(queries: Tensor, keys: Tensor, block: Block, softcap: float | None) -> Tensor:
    # One product per key head: its query heads are rows of the same matrix, so shared keys are never copied.
    logits = _product(queries.flatten(2, 3), keys, block.room).unflatten(2, queries.shape[2:4])
    if softcap is not None:
        softcap = softcap / UNIT
        logits = torch.tanh(logits / softcap) * softcap
    if block.bias is not None:
        logits = logits + block.bias / UNIT
    if block.score is not None:
        logits = block.score(logits * UNIT) / UNIT
    return logits if block.admitted is None else logits.masked_fill_(~block.admitted, MASKED)


def _product(queries: Tensor, keys: Tensor, room: Room | None) -> Tensor:
    if room is None:
        return queries @ keys.mT
    shape = (*queries.shape[:-1], keys.shape[-2])
    out = room.take("logits", shape, queries)
    torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT, out=out.flatten(0, 1))
    return out


def _exponentials(running: Running, logits: Tensor, room: Room | None) -> tuple[Tensor, Tensor, Tensor]:
    """e, ω − maximum, and the new maximum; the logits are overwritten."""
    maximum = torch.maximum(running.maximum, logits.amax(-1))
    shifted = logits.sub_(maximum[..., None])
    if room is None:
        return shifted.exp2(), shifted, maximum
    return torch.exp2(shifted, out=room.take("exponentials", shifted.shape, shifted)), shifted, maximum


def _add(
    running: Running, maximum: Tensor, e: Tensor, shifted: Tensor, block: Block, *, total: Tensor, **further: Tensor
) -> Running:
    """The old sums relative to the new maximum, plus the block's."""
    down = running.maximum - maximum
    factor = down.exp2()
    old = running.sums.clone()
    old[SHIFTED].addcmul_(down, old[TOTAL])
    old.mul_(factor)
    old[SQUARE].mul_(factor)
    first = torch.zeros_like(total) if block.first is None else _first(e, block.first)
    compiling = torch.compiler.is_compiling()
    square = e.square().sum(-1) if compiling else torch.linalg.vector_norm(e, dim=-1).square()
    shifted_sum = shifted.mul_(e).sum(-1)
    new = torch.stack([total, shifted_sum, square, further["distance"], further["close"], first])
    return Running(maximum, old.add_(new))


def with_sinks(maximum: Tensor, sums: Tensor, sinks: Float[Tensor, "heads 1"]) -> Tensor:
    """The sums, as if one more key with these logits had been seen that is nowhere: not near, not first, no distance.

    They stay relative to the largest of both.
    """
    top = torch.maximum(maximum, sinks)
    down, own = maximum - top, sinks - top
    factor, e = down.exp2(), own.exp2()
    sums = sums.clone()
    sums[SHIFTED].addcmul_(down, sums[TOTAL])
    sums.mul_(factor)
    sums[SQUARE].mul_(factor).add_(e.square())
    sums[TOTAL].add_(e)
    sums[SHIFTED].add_(e * own)
    return sums


def _first(e: Tensor, first: Tensor) -> Tensor:
    """The first token's e, where this block holds it."""
    here = (first >= 0) & (first < e.shape[-1])
    index = first.clamp(0, e.shape[-1] - 1)[:, None, None, :, None]
    return e.gather(-1, index.expand(*e.shape[:-1], 1))[..., 0] * here[:, None, None]
