"""Explain an attention call's queries or keys from numbers: which rows of a product, which rotation.

Functions of tensors. Every answer is a hypothesis that reproduces all numbers given, or None.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import refusal
from ...positions import Given, Rotary
from ...projections import Norm
from ..module import module_of_row
from ..schema import Attention, NormAt
from .head_norms import Kind, Made, Source, Vectors
from .tensors import ModuleTensors
from .watch import Normed, Product

EPSILONS = (1e-5, 1e-6, 1e-8, 0.0)


def tolerance(dtype: torch.dtype) -> float:
    """Tolerated distance of two ways of computing one number, relative to the largest of them."""
    return max(1e-5, 4 * torch.finfo(dtype).eps)


def alike(one: Tensor, other: Tensor, allowed: float) -> bool:
    return float((one - other).abs().max()) <= allowed * max(float(other.abs().max()), 1e-30)


def explain_plain(vectors: Vectors, source: Source, allowed: float) -> Iterator[Made]:
    """Heads that are blocks of rows at the first token, where no rotation has turned them; and so for all tokens.

    A query or key may carry the logit's scale already, so a common factor is looked for.
    """
    size, rows = vectors.shape[-1], source.rows
    for factor in (1.0, size**-0.5, size**-0.25, *_factors(vectors[:, 0, 0], rows[:, 0], allowed)):
        starts = _starts(vectors[:, 0] / factor, rows[:, 0], allowed)
        if starts is not None:
            yield Made(source, starts, cut_heads(rows, starts, size) * factor, factor=factor)


def _factors(head: Float[Tensor, "batch d_head"], rows: Float[Tensor, "batch rows"], allowed: float) -> Iterator[float]:
    """The factor of one head over a block of rows: YaRN makes what it turns a little longer."""
    for block in rows.split(head.shape[-1], -1):
        factor = float((head * block).sum() / block.square().sum()) if block.shape == head.shape else 0.0
        if factor > 0 and alike(factor * block, head, allowed):
            yield factor


def cut_heads(rows: Float[Tensor, "batch tokens rows"], starts: tuple[int, ...], size: int) -> Vectors:
    return torch.stack([rows[..., start : start + size] for start in starts], -2)


def _starts(
    wanted: Float[Tensor, "batch heads d_head"], rows: Float[Tensor, "batch rows"], allowed: float
) -> tuple[int, ...] | None:
    """Find the row where each head's block begins; None if one of them is nowhere.

    Heads that are alike, as copies are before training, or that are zero get rows of their own while there are some.
    """
    size, limit = wanted.shape[-1], allowed * max(float(wanted.abs().max()), 1e-30)
    starts = []
    for head in wanted.unbind(1):
        close = ((rows - head[:, :1]).abs() <= limit).all(0)
        candidates = close[: rows.shape[-1] - size + 1].nonzero()[:, 0].tolist()
        fits = [start for start in candidates if bool(((rows[:, start : start + size] - head).abs() <= limit).all())]
        if not fits:
            return None
        starts.append(next((fit for fit in fits if all(abs(fit - start) >= size for start in starts)), fits[0]))
    return tuple(starts)


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
    # From the first step alone, rounding grows with the position: late tokens would not be explained.
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


def batched(tensor: Tensor, batch: int, tokens: int) -> Iterator[Tensor]:
    """(batch, tokens, rows), whichever of the two came first, or whether they were one."""
    width = tensor.shape[-1]
    if tensor.shape[:-1].numel() != batch * tokens:
        return
    sequence_first = tensor.dim() == 3 and tuple(tensor.shape[:2]) == (tokens, batch) and batch != tokens
    if not sequence_first:
        yield tensor.reshape(batch, tokens, width)
    if batch > 1 or sequence_first:
        yield tensor.reshape(tokens, batch, width).transpose(0, 1)


def is_transposed(product: Product, tensors: ModuleTensors, allowed: float) -> bool:
    """Tell whether the weight is stored as (in, out): by its shape, and by the numbers of two tokens."""
    x, y = (part.flatten(0, -2)[:2].float() for part in (product.x, product.y))
    for transposed in (False, True):
        row = Attention("decoder", product.name, product.name, transposed=transposed)
        module = module_of_row(row, tensors)
        weight = module.weight(product.name).detach().float()
        if weight.shape == (y.shape[-1], x.shape[-1]):
            bias = module.bias(product.name)
            if alike(x @ weight.T, y if bias is None else y - bias.detach().float(), allowed):
                return transposed
    raise refusal(f"`{product.name}` as W x + b, with the bias stored with the weight", "another map")


def norm_over(*sides: Made) -> Literal["head", "projection"]:
    whole = {made.whole for made in sides if made.norm is not None}
    if len(whole) > 1:
        raise refusal("one kind of QK-norm for queries and keys", "one over each head and one over all")
    return "projection" if whole == {True} else "head"


def norm_behind(norms: Sequence[Normed], x: Tensor) -> Normed | None:
    """The norm whose output this is; as a whole, or row by row: in windows, padded, in chunks, reshaped."""
    for norm in reversed(norms):
        if norm.y is x or (norm.y.shape == x.shape and torch.equal(norm.y, x)):
            return norm
    wanted, by_name = x.reshape(-1, x.shape[-1]), dict[str, list[Normed]]()
    wanted = wanted[wanted.any(-1)]  # what pads a window
    for norm in norms:
        if norm.x.shape == norm.y.shape and (norm.y.shape[-1], norm.y.dtype) == (x.shape[-1], x.dtype):
            by_name.setdefault(norm.name, []).append(norm)
    for calls in by_name.values() if len(wanted) else ():
        given, made = (torch.cat([getattr(one, side).flatten(0, -2) for one in calls]) for side in "xy")
        # Without the look at one row, all rows of every norm would be sorted for each input that came out of none.
        if bool((made == wanted[0]).all(-1).any()):
            places = {row: number for number, row in enumerate(_rows_as_bytes(made))}
            numbers = [places.get(row, -1) for row in _rows_as_bytes(wanted)]
            if min(numbers) >= 0:
                return replace(calls[0], x=given[numbers], y=wanted)
    return None


def _rows_as_bytes(rows: Tensor) -> list[bytes]:
    return [row.tobytes() for row in rows.detach().cpu().contiguous().view(torch.uint8).numpy()]


def read_norm_of(norm: Normed, allowed: float) -> NormAt | None:
    """A module's norm as the tables write it; None where its numbers are not those of a norm that they know."""
    names = ("eps", "variance_epsilon", "epsilon", "norm_eps")
    stated = next((value for name in names if isinstance(value := getattr(norm.module, name, None), float)), None)
    epsilons = (*EPSILONS, torch.finfo(norm.x.dtype).eps) if stated is None else (stated,)
    parts = (getattr(norm.module, name, None) for name in ("weight", "bias"))
    gain, bias = (None if part is None else part.detach().float() for part in parts)
    if gain is not None and gain.shape != norm.x.shape[-1:]:
        return None
    is_layer = isinstance(norm.module, nn.LayerNorm)
    kinds: tuple[Kind, ...] = ("layer", "rms", "l2") if is_layer else ("rms", "layer", "l2")
    nearest, limit = None, allowed * max(float(norm.y.abs().max()), 1e-30)
    for epsilon, plus_one, kind in itertools.product(epsilons, (False, True), kinds):
        made = Norm(kind, None if gain is None else gain + plus_one, bias, epsilon)(norm.x.float())
        # In half precision several are near enough: the first of them may be another kind.
        if (apart := float((made - norm.y.float()).abs().max())) <= limit:
            place = NormAt(kind, norm.name, epsilon=epsilon, plus_one=plus_one, plain=gain is None)
            nearest, limit = replace(place, biased=bias is not None), apart * (1 - 1e-6)
    return nearest
