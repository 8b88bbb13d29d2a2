"""One block of keys folded into running sums relative to a running maximum: the arithmetic of `streaming`.

Plain functions of tensors, so that `torch.compile` can fuse them.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# Finite, so that e^(masked − max) · (masked − max) is 0 and not NaN; sums of it over any real text stay finite too.
MASKED = -1e30

Rows = Float[Tensor, "batch groups ratio queries"]


class Running(NamedTuple):
    """Sums over the keys seen, with e = e^(ω − maximum)."""

    maximum: Rows
    total: Rows  # Σ e
    shifted: Rows  # Σ e (ω − maximum)
    square: Rows  # Σ e²
    distance: Rows  # Σ e |i − j|
    near: Rows  # Σ e over near keys
    first: Rows  # e of the first token


class Keys(NamedTuple):
    """What a block of keys brings besides the vectors; None where it does not matter."""

    admitted: Bool[Tensor, "batch groups ratio queries keys"] | None
    bias: Float[Tensor, "batch groups ratio queries keys"] | None
    first: Int[Tensor, "batch queries"] | None  # where in the block each query's first token is, if it is


def start(queries: Float[Tensor, "batch groups ratio queries d_head"]) -> Running:
    """Nothing seen yet."""
    zero = queries.new_zeros(queries.shape[:-1])
    return Running(torch.full_like(zero, MASKED), *[zero] * 6)


def absorb_far(
    running: Running,
    queries: Float[Tensor, "batch groups ratio queries d_head"],
    keys: Float[Tensor, "batch groups keys d_head"],
    block: Keys,
    softcap: float | None,
    offset: Float[Tensor, "batch queries"],
    inner: Float[Tensor, "batch keys"],
) -> Running:
    """A block all on one side and not near: |i − j| = offset_i + inner_j, so two columns of a product give its sums."""
    running, e, maximum = _rescale(running, _logits(queries, keys, block, softcap))
    columns = torch.stack([torch.ones_like(inner), inner], -1)
    columns = columns[0] if len(columns) == 1 else columns[:, None, None]
    total, within = (e @ columns).unbind(-1)
    distance = running.distance + total * offset[:, None, None] + within
    return _add(running, e, maximum, block, total=total)._replace(distance=distance)


def absorb_near(
    running: Running,
    queries: Float[Tensor, "batch groups ratio queries d_head"],
    keys: Float[Tensor, "batch groups keys d_head"],
    block: Keys,
    softcap: float | None,
    distance: Float[Tensor, "batch queries keys"],
    near: int,
) -> Running:
    """Any block: distances one by one."""
    running, e, shifted = _rescale(running, _logits(queries, keys, block, softcap))
    distance = distance[:, None, None]
    far = running.distance + (e * distance).sum(-1)
    close = running.near + (e * (distance < near)).sum(-1)
    return _add(running, e, shifted, block, total=e.sum(-1))._replace(distance=far, near=close)


def _logits(queries: Tensor, keys: Tensor, block: Keys, softcap: float | None) -> Tensor:
    # One product per key head: its query heads are rows of the same matrix, so shared keys are never copied.
    logits = (queries.flatten(2, 3) @ keys.mT).unflatten(2, queries.shape[2:4])
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if block.bias is not None:
        logits = logits + block.bias
    return logits if block.admitted is None else logits.masked_fill(~block.admitted, MASKED)


def _rescale(running: Running, logits: Tensor) -> tuple[Running, Tensor, Tensor]:
    """All sums relative to the new maximum; e and ω − maximum of the block."""
    maximum = torch.maximum(running.maximum, logits.amax(-1))
    shifted = logits.sub_(maximum[..., None])
    down = running.maximum - maximum
    factor = down.exp()
    moved = Running(
        maximum,
        running.total * factor,
        (running.shifted + down * running.total) * factor,
        running.square * factor.square(),
        running.distance * factor,
        running.near * factor,
        running.first * factor,
    )
    return moved, shifted.exp(), shifted


def _add(running: Running, e: Tensor, shifted: Tensor, block: Keys, *, total: Tensor) -> Running:
    running = running._replace(
        total=running.total + total,
        shifted=running.shifted + (shifted * e).sum(-1),
        square=running.square + torch.linalg.vector_norm(e, dim=-1).square(),
    )
    if block.first is None:
        return running
    here = (block.first >= 0) & (block.first < e.shape[-1])
    index = block.first.clamp(0, e.shape[-1] - 1)[:, None, None, :, None]
    found = e.gather(-1, index.expand(*e.shape[:-1], 1))[..., 0]
    return running._replace(first=running.first + found * here[:, None, None])
