"""How an attention call's queries or keys were made, from numbers: which rows of a product, which norm, which rotation.

Pure functions of tensors. Every answer is a hypothesis that reproduces all numbers given, or None.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ...positions import Given, Rotary
from ...projections import Norm

LOOSE = 0.1
Vectors = Float[Tensor, "batch tokens heads d_head"]


def tolerance(dtype: torch.dtype) -> float:
    """How far two ways of computing one number may lie apart, against the largest of them."""
    return max(1e-5, 4 * torch.finfo(dtype).eps)


def alike(one: Tensor, other: Tensor, allowed: float) -> bool:
    return float((one - other).abs().max()) <= allowed * max(float(other.abs().max()), 1e-30)


@dataclass(frozen=True)
class Side:
    """One side of a call: head h is norm(y[starts[h] : starts[h] + d_head]) · factor, then turned by `rotary`."""

    starts: tuple[int, ...]
    norm: "HeadNorm | None" = None
    factor: float = 1.0


@dataclass(frozen=True)
class HeadNorm:
    """A norm of every head, or of all rows together (`whole`), whose gain is the parameter `gain`, if it has one."""

    kind: Literal["layer", "rms", "l2"]
    gain: str | None
    epsilon: float
    plus_one: bool = False
    whole: bool = False


def explain_plain(
    vectors: Vectors, rows: Float[Tensor, "batch tokens rows"], allowed: float
) -> Iterator[tuple[Side, Vectors]]:
    """Heads that are blocks of rows at the first token, where no rotation has turned them; and so for all tokens.

    A query or key may carry the logit's scale already, so a common factor is looked for.
    """
    size = vectors.shape[-1]
    for factor in (1.0, size**-0.5, size**-0.25):
        starts = _starts(vectors[:, 0] / factor, rows[:, 0], allowed)
        if starts is not None:
            yield Side(starts, factor=factor), _cut(rows, starts, size) * factor


def explain_normed(
    vectors: Vectors,
    rows: Float[Tensor, "batch tokens rows"],
    gains: dict[str, Tensor],
    epsilons: tuple[float, ...],
    allowed: float,
) -> Iterator[tuple[Side, Vectors]]:
    """The same behind a norm of each block of rows, or of all rows at once, with any of the gains or none."""
    size, width = vectors.shape[-1], rows.shape[-1]
    if width % size:
        return
    for kind, whole in itertools.product(("rms", "layer", "l2"), (False, True)):
        for name, gain, plus_one in _gains(gains, width, size):

            def scaled(epsilon: float, kind: Any = kind, whole=whole, gain=gain) -> Tensor:
                norm, blocks = Norm(kind, epsilon=epsilon), rows if whole else rows.unflatten(-1, (-1, size))
                return norm(blocks).reshape(rows.shape) * gain.repeat(width // len(gain))

            # The epsilon matters little: a loose fit with any of them first.
            if _starts(vectors[:1, 0, :1], scaled(epsilons[0])[:1, 0], LOOSE) is None:
                continue
            for epsilon in epsilons:
                made = scaled(epsilon)
                starts = _starts(vectors[:, 0], made[:, 0], allowed)
                if starts is not None:
                    yield Side(starts, HeadNorm(kind, name, epsilon, plus_one, whole)), _cut(made, starts, size)
                    break


def _cut(rows: Float[Tensor, "batch tokens rows"], starts: tuple[int, ...], size: int) -> Vectors:
    return torch.stack([rows[..., start : start + size] for start in starts], -2)


def _starts(
    wanted: Float[Tensor, "batch heads d_head"], rows: Float[Tensor, "batch rows"], allowed: float
) -> tuple[int, ...] | None:
    """Where each head's block begins among the rows; None if one of them is nowhere."""
    size, limit = wanted.shape[-1], allowed * max(float(wanted.abs().max()), 1e-30)
    starts = []
    for head in wanted.unbind(1):
        close = ((rows - head[:, :1]).abs() <= limit).all(0)
        candidates = close[: rows.shape[-1] - size + 1].nonzero()[:, 0].tolist()
        fits = (start for start in candidates if bool(((rows[:, start : start + size] - head).abs() <= limit).all()))
        start = next(fits, None)
        if start is None:
            return None
        starts.append(start)
    return tuple(starts)


def _gains(gains: dict[str, Tensor], width: int, size: int) -> Iterator[tuple[str | None, Tensor, bool]]:
    """No gain, or one of a head's size or of all rows; as it is stored, or less one."""
    yield None, torch.ones(1), False
    for plus_one in (False, True):
        for name, gain in gains.items():
            if len(gain) in (size, width):
                yield name, gain + plus_one, plus_one


def explain_rotation(vectors: Vectors, plain: Vectors, allowed: float) -> tuple[Rotary | None] | None:
    """(None,) where nothing turns, (rotary,) where positions 0, 1, 2, … do, None where it is something else."""
    if alike(plain, vectors, allowed):
        return (None,)
    size = vectors.shape[-1]
    moving = ((vectors - plain).abs() > allowed * float(vectors.abs().max())).flatten(0, 2).any(0).nonzero()[:, 0]
    for num_dims in range(size - size % 2, 0, -2):
        for start in sorted({0, size - num_dims}):
            if not start <= int(moving.min()) <= int(moving.max()) < start + num_dims:
                continue
            for interleaved in (False, True):
                rotary = _fit(vectors, plain, Rotary(1e4, num_dims, start, interleaved), allowed)
                if rotary is not None:
                    return (rotary,)
    return None


def turned(rotary: Rotary | None, plain: Vectors) -> Vectors:
    """The vectors at positions 0, 1, 2, …"""
    if rotary is None:
        return plain
    positions = torch.arange(plain.shape[1])
    return rotary.rotate(plain.transpose(1, 2), positions, length=len(positions)).transpose(1, 2)


def _fit(vectors: Vectors, plain: Vectors, shape: Rotary, allowed: float) -> Rotary | None:
    """The frequencies that turn `plain` into `vectors` by the pairs of `shape`, as a base if one has them all."""
    first, second = shape.pairs.unbind(-1)
    before = torch.complex(plain[..., first].double(), plain[..., second].double())
    after = torch.complex(vectors[..., first].double(), vectors[..., second].double())
    # One turn per position and pair, whatever the batch and the head: the largest vectors weigh most.
    turns = (after * before.conj()).sum((0, 2))
    frequencies = _frequencies(turns)
    given = replace(shape, scaling=Given(tuple(frequencies.tolist())))
    if not alike(turned(given, plain), vectors, allowed):
        return None
    if shape.interleaved and bool((frequencies == 0).any()):  # the last pairs stand still: they are not turned at all
        frequencies = frequencies[: int(frequencies.nonzero().max()) + 1]
        shape = replace(shape, num_dims=2 * len(frequencies))
        given = replace(shape, scaling=Given(tuple(frequencies.tolist())))
    for base in _bases(frequencies, shape.num_dims):
        rotary = replace(shape, base=base)
        if alike(turned(rotary, plain), vectors, allowed):
            return rotary
    return given


def _frequencies(turns: Tensor) -> Float[Tensor, " pairs"]:
    """Radians per position: from the first step, then from ever longer ones, whose whole turns are known by then."""
    frequencies = turns[1].angle() if len(turns) > 1 else turns.new_zeros(turns.shape[1]).real
    position = 1
    while position < len(turns) - 1:
        position = min(2 * position, len(turns) - 1)
        rest = torch.remainder(turns[position].angle() - position * frequencies + math.pi, 2 * math.pi) - math.pi
        frequencies = frequencies + rest / position
    return frequencies


def _bases(frequencies: Float[Tensor, " pairs"], num_dims: int) -> list[float]:
    """base^(−2j/num_dims) = f_j read off the faster pairs; a round number first."""
    seen = (frequencies > 1e-3).nonzero()[:, 0]
    later = seen[seen > 0]
    if not len(later):
        return [1e4]
    exponents = -num_dims / (2 * later.double())
    measured = float((frequencies[later].log() * exponents).median().exp())
    if not math.isfinite(measured) or measured <= 0:
        return []
    return [float(f"{measured:.{digits}g}") for digits in (1, 2, 3, 4, 9)]
