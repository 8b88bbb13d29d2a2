"""One block of keys folded into running sums relative to a running maximum: the arithmetic of `streaming`.

The sums are one tensor, so that few calls move them.
Logits are in units of log 2 throughout: 2^x stays quick where it underflows, e^x becomes up to eighty times slower.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Finite, so that 2^(masked − max) · (masked − max) is 0 and not NaN; sums of it over any real text stay finite too.
MASKED = -1e30
UNIT = math.log(2)
IN_CACHE = 1 << 18  # logits worked on at once: with their exponentials 2 MB, the second cache of most processors

TOTAL, SHIFTED, SQUARE, DISTANCE, CLOSE, FIRST = range(6)

Grouped = Float[Tensor, "batch groups ratio queries d_head"]


class Running(NamedTuple):
    """The largest logit so far, and sums over the keys seen with e = 2^(ω − maximum):

    Σ e, Σ e (ω − maximum), Σ e², Σ e |i − j|, Σ e over near keys, e of the first token.
    """

    maximum: Float[Tensor, "batch groups ratio queries"]
    sums: Float[Tensor, "6 batch groups ratio queries"]


class Room:
    """Memory for the logits and exponentials of a few heads, used again for the next: they stay in the cache."""

    def __init__(self, least: int) -> None:
        self.least = least  # numbers from the start: blocks that grow would each ask for fresh pages
        self.flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a buffer of this name and shape; its earlier contents are lost."""
        number = math.prod(shape)
        if name not in self.flat or self.flat[name].numel() < number:
            self.flat[name] = like.new_empty(max(number, self.least))
        return self.flat[name][:number].view(*shape)


class Block(NamedTuple):
    """Data of a block of keys besides their vectors; None where it does not matter."""

    admitted: Bool[Tensor, "batch groups ratio queries keys"] | None
    bias: Float[Tensor, "batch groups ratio queries keys"] | None
    first: Int[Tensor, "batch queries"] | int | None  # where in the block the first token is, of each query or of all
    score: Callable[[Tensor], Tensor] | None  # what becomes of the logits before the mask
    room: Room

    def of(self, batch: slice, groups: slice) -> "Block":
        """Slice the block for some of the texts and key heads; sizes of 1 broadcast."""
        admitted, bias = (None if one is None else _some(one, batch, groups) for one in (self.admitted, self.bias))
        first = self.first[batch] if isinstance(self.first, Tensor) and len(self.first) > 1 else self.first
        return self._replace(admitted=admitted, bias=bias, first=first)


def _some(values: Tensor, batch: slice, groups: slice) -> Tensor:
    values = values if len(values) == 1 else values[batch]
    return values if values.shape[1] == 1 else values[:, groups]


def pieces(batch: int, groups: int, *, one: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Texts and key heads, `one` number each, so that a piece stays within `most`, if it has more than one of each."""
    num_groups = max(1, min(groups, most // one))
    num_texts = max(1, most // (one * num_groups)) if num_groups == groups else 1
    for texts in cut(batch, num_texts):
        for some in cut(groups, num_groups):
            yield texts, some


def cut(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def nothing_seen(queries: Grouped) -> Running:
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
    """A block all on one side and not near: |i − j| = offset_i + inner_j, so Σ e and Σ e · inner give its distances."""

    def measure(e: Tensor, free: Tensor, batch: slice) -> tuple[Tensor, None]:
        return _weighted(e, inner if len(inner) == 1 else inner[batch]), None

    found = _sums(queries, keys, block, softcap, measure)
    found.sums[DISTANCE].addcmul_(found.sums[TOTAL], offset[:, None, None])
    return _merge(running, found)


def _weighted(e: Tensor, inner: Float[Tensor, "#batch keys"]) -> Tensor:
    return e @ inner[0] if len(inner) == 1 else (e * inner[:, None, None, None]).sum(-1)


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
    distance = distance[:, None, None]
    is_near = (distance < near).to(distance)

    def measure(e: Tensor, free: Tensor, batch: slice) -> tuple[Tensor, Tensor]:
        whose = slice(None) if len(distance) == 1 else batch
        return torch.mul(e, distance[whose], out=free).sum(-1), torch.mul(e, is_near[whose], out=free).sum(-1)

    return _merge(running, _sums(queries, keys, block, softcap, measure))


# From exponentials, memory that is free, and whose they are: Σ e · (a part of the distance), Σ e of near keys if any.
Measure = Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor | None]]


def _sums(queries: Tensor, keys: Tensor, block: Block, softcap: float | None, measure: Measure) -> Running:
    """The sums of one block by itself, a few heads after the others where that keeps them in the cache."""
    batch, groups, ratio, num_queries, _ = queries.shape
    found = nothing_seen(queries)
    one = max(1, ratio * num_queries * keys.shape[-2])
    whole = batch * groups * one
    for texts, some in pieces(batch, groups, one=one, most=IN_CACHE if block.score is None else whole):
        part = Running(found.maximum[texts, some], found.sums[:, texts, some])
        _piece_sums(queries[texts, some], keys[texts, some], block.of(texts, some), softcap, measure, texts, part)
    return found


def _piece_sums(
    queries: Tensor, keys: Tensor, block: Block, softcap: float | None, measure: Measure, batch: slice, found: Running
) -> None:
    """Write statistics of a piece into `found`, a part of the whole."""
    logits = _logits(queries, keys, block, softcap)
    maximum = logits.amax(-1)
    shifted = logits.sub_(maximum[..., None])
    e = torch.exp2(shifted, out=block.room.take("e", shifted.shape, shifted))
    square = torch.linalg.vector_norm(e, dim=-1).square_()
    shifted_sum = shifted.mul_(e).sum(-1)
    distance, close = measure(e, shifted, batch)
    total, nothing = e.sum(-1), found.sums[CLOSE]
    first = nothing if block.first is None else _first(e, block.first)
    numbers = [total, shifted_sum, square, distance, nothing if close is None else close, first]
    found.maximum.copy_(maximum)
    found.sums.copy_(torch.stack(numbers))


def _logits(queries: Tensor, keys: Tensor, block: Block, softcap: float | None) -> Tensor:
    # One product per key head: its query heads are rows of the same matrix, so shared keys are never copied.
    logits = _product(queries.flatten(2, 3), keys, block.room).unflatten(2, queries.shape[2:4])
    if softcap is not None:
        softcap = softcap / UNIT
        logits = torch.tanh(logits / softcap) * softcap
    if block.bias is not None:
        logits = logits + block.bias / UNIT
    if block.score is not None:
        logits = (block.score(logits * UNIT) / UNIT).clamp(min=MASKED)  # it may mask by −∞
    return logits if block.admitted is None else logits.masked_fill_(~block.admitted, MASKED)


def _product(queries: Tensor, keys: Tensor, room: Room) -> Tensor:
    shape = (*queries.shape[:-1], keys.shape[-2])
    out = room.take("logits", shape, queries)
    torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT, out=out.flatten(0, 1))
    return out


def _merge(running: Running, found: Running) -> Running:
    """Both, relative to the larger maximum of the two."""
    maximum = torch.maximum(running.maximum, found.maximum)
    return Running(maximum, _relative(running, maximum).add_(_relative(found, maximum)))


def _relative(running: Running, maximum: Tensor) -> Tensor:
    """The sums, relative to a larger maximum."""
    down = running.maximum - maximum
    factor, sums = down.exp2(), running.sums.clone()
    sums[SHIFTED].addcmul_(down, sums[TOTAL])
    sums.mul_(factor)
    sums[SQUARE].mul_(factor)
    return sums


def with_sinks(maximum: Tensor, sums: Tensor, sinks: Float[Tensor, "heads 1"]) -> Tensor:
    """The sums, as if one more key with these logits had been seen that is nowhere: not near, not first, no distance.

    They stay relative to the largest of both.
    """
    top = torch.maximum(maximum, sinks)
    own = sinks - top
    sums, e = _relative(Running(maximum, sums), top), own.exp2()
    sums[SQUARE].add_(e.square())
    sums[TOTAL].add_(e)
    sums[SHIFTED].add_(e * own)
    return sums


def _first(e: Tensor, first: Tensor | int) -> Tensor:
    """The first token's e, where this block holds it; a number where all queries have the same."""
    if isinstance(first, int):
        return e[..., first]
    here = (first >= 0) & (first < e.shape[-1])
    index = first.clamp(0, e.shape[-1] - 1)[:, None, None, :, None]
    return e.gather(-1, index.expand(*e.shape[:-1], 1))[..., 0] * here[:, None, None]
