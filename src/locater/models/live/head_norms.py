"""Find the norm between a product and a call's queries or keys: by directions first, then by lengths.

A norm with a gain g turns rows y into f·g∘(y − [mean y])/√(mean square + ε): the direction tells the rows and the gain,
the length the epsilon, at every token, for a rotation behind it changes no length.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..schema import NormAt
from .watch import Product

Vectors = Float[Tensor, "batch tokens heads d_head"]
Kind = Literal["layer", "rms", "l2"]
MOST_TEXTS = 4  # that take part in the search; the proof looks at one
KEPT = 3  # epsilons that fit equally well


class Source(NamedTuple):
    """A product, and its output as (batch, tokens, rows)."""

    product: Product
    rows: Float[Tensor, "batch tokens rows"]


@dataclass(frozen=True, eq=False)
class Made:
    """One side of a call by a product y: head h is norm(y[starts[h] : starts[h] + d_head]) · factor, then turned.

    `plain` are these vectors before any rotation, `behind` a gain that came after one. The norm is one of every head,
    or of all rows together (`whole`); its name is that of its gain.
    """

    source: Source
    starts: tuple[int, ...]
    plain: Vectors
    norm: NormAt | None = None
    whole: bool = False
    factor: float = 1.0
    behind: Tensor | None = None

    @property
    def product(self) -> Product:
        return self.source.product

    def without_gain(self, vectors: Vectors) -> Vectors:
        """Divide by the gain that came after the rotation, where there is one."""
        return vectors if self.behind is None else vectors / self.behind


@dataclass(frozen=True, eq=False)
class Gain:
    """Possible factor and bias of a norm: one head's numbers, or those of all; `name` None: nothing."""

    name: str | None
    values: Float[Tensor, " numbers"]
    bias: Float[Tensor, " numbers"] | None = None
    plus_one: bool = False
    single: bool = False

    def norm(self, kind: Kind, epsilon: float) -> NormAt:
        """The norm with this gain, as the tables write it."""
        norm = NormAt(kind, self.name or "", epsilon=epsilon, plain=self.name is None)
        return replace(norm, plus_one=self.plus_one, single=self.single, biased=self.bias is not None)


def explain_normed(
    vectors: Vectors,
    source: Source,
    gains: Sequence[Gain],
    epsilons: Sequence[float],
    allowed: float,
) -> Iterator[Made]:
    """Heads that are blocks of rows behind a norm of each, or of all rows at once, with any of the gains."""
    size = vectors.shape[-1]
    ways = itertools.product((1.0, size**-0.5, size**-0.25), (False, True), (False, True), gains)
    for factor, whole, centred, gain in ways:
        wanted = vectors / factor
        for starts, cut, square, bias in _aligned(wanted, source.rows, gain, allowed, centred=centred, whole=whole):
            for kind, epsilon in _lengths(wanted, cut, square, bias, centred, epsilons, allowed):
                norm = gain.norm(kind, epsilon)
                plain = cut * (square * _terms(kind, size) + epsilon).rsqrt()[..., None]
                plain = factor * (plain if bias is None else plain + bias)
                yield Made(source, tuple(size * start for start in starts), plain, norm, whole, factor)


def explain_scaled(
    vectors: Vectors,
    source: Source,
    gains: Sequence[Gain],
    epsilons: Sequence[float],
    allowed: float,
) -> Iterator[Made]:
    """Heads behind a norm that a constant multiplies as well: its lengths tell the constant, a short number first."""
    for whole, centred, gain in itertools.product((False, True), (False, True), gains):
        if gain.bias is not None:
            continue
        for _, cut, square, _ in _aligned(vectors, source.rows, gain, allowed, centred=centred, whole=whole):
            lengths = [torch.linalg.vector_norm(part.double(), dim=-1) for part in (vectors, cut)]
            measured = float((lengths[0] / lengths[1] * square.double().sqrt()).nanmedian())
            for factor in dict.fromkeys(float(f"{measured:.{digits}g}") for digits in (2, 3, 4, 7)):
                found = list(explain_normed(vectors / factor, source, [gain], epsilons, allowed)) if factor > 0 else []
                for made in (made for made in found if made.factor == 1.0):
                    yield replace(made, factor=factor, plain=factor * made.plain)


def explain_behind(
    vectors: Vectors,
    source: Source,
    gains: Sequence[Gain],
    epsilons: Sequence[float],
    allowed: float,
) -> Iterator[Made]:
    """Heads whose gain came behind a rotation: divided by it, they are turned rows of a norm without one."""
    num_heads, size = vectors.shape[-2:]
    for gain in gains:
        values, least = gain.values, 1e-3 * gain.values.abs().max()
        if gain.name is None or gain.single or gain.bias is not None or values.abs().min() <= least:
            continue
        if (each := of_each_head(values, num_heads, size)) is None:
            continue
        for made in explain_normed(vectors / each, source, [Gain(None, torch.ones(1))], epsilons, allowed):
            if made.norm is not None and made.norm.kind != "layer" and not made.whole:
                norm = replace(made.norm, name=gain.name, plain=False, plus_one=gain.plus_one)
                yield replace(made, norm=norm, behind=each)


def _aligned(
    vectors: Vectors, rows: Tensor, gain: Gain, allowed: float, *, centred: bool, whole: bool
) -> Iterator[tuple[list[int], Vectors, Tensor, Tensor | None]]:
    """Find the block of rows that every head points along; yield the blocks, cut out, mean squares, and bias."""
    num_heads, size = vectors.shape[-2:]
    if rows.shape[-1] % size or (factors := _by_head(gain, num_heads, size, rows.shape[-1] if whole else None)) is None:
        return
    (gains, bias), blocks = factors, rows.unflatten(-1, (-1, size))
    over = rows[..., None, :] if whole else blocks
    mean = over.mean(-1, keepdim=True) if centred else 0.0
    square, unscaled = (over - mean).square().mean(-1), (blocks - mean)[:, :, None] * gains
    starts = _directions(vectors[:, 0] if bias is None else vectors[:, 0] - bias, unscaled[:, 0], allowed)
    if starts is not None:
        index = torch.tensor(starts)
        heads = torch.arange(num_heads) if unscaled.shape[2] > 1 else torch.zeros_like(index)
        yield starts, unscaled[:, :, heads, index], square if whole else square[..., index], bias


def _by_head(
    gain: Gain, num_heads: int, size: int, num_rows: int | None
) -> tuple[Float[Tensor, "#heads #blocks #d_head"], Float[Tensor, "#heads d_head"] | None] | None:
    """Gain and bias of each head, and of each block in a norm of all `num_rows`; None where the sizes do not fit."""
    values = gain.values
    if len(values) in (1, size):
        return values[None, None], None if gain.bias is None else gain.bias[None]
    if num_rows is not None:
        fits = len(values) == num_rows and gain.bias is None
        return (values.unflatten(0, (-1, size))[None], None) if fits else None
    each = of_each_head(values, num_heads, size)
    bias = None if gain.bias is None else of_each_head(gain.bias, num_heads, size)
    return None if each is None else (each[:, None], bias)


def of_each_head(values: Tensor, num_heads: int, size: int) -> Float[Tensor, "heads d_head"] | None:
    """Numbers of some heads, or of each, as those of each head; None where the sizes do not fit."""
    if len(values) % size or num_heads * size % len(values):
        return None
    return values.unflatten(0, (-1, size)).repeat_interleave(num_heads * size // len(values), 0)


def _directions(wanted: Float[Tensor, "batch heads d_head"], blocks: Tensor, allowed: float) -> list[int] | None:
    """The block that each head is a positive multiple of at the first token, where no rotation has turned it."""
    wanted, blocks = wanted[:MOST_TEXTS, :, None], blocks[:MOST_TEXTS]
    times = (wanted * blocks).sum(-1) / blocks.square().sum(-1)
    apart = (wanted - times[..., None] * blocks).abs().amax(-1)
    fits = ((apart <= allowed * max(float(wanted.abs().max()), 1e-30)) & (times > 0)).all(0)
    return fits.int().argmax(-1).tolist() if bool(fits.any(-1).all()) else None


def _terms(kind: str, size: int) -> int:
    """By how much the mean square is too small: `l2` divides by a sum."""
    return size if kind == "l2" else 1


def _lengths(
    vectors: Vectors,
    cut: Vectors,
    square: Tensor,
    bias: Tensor | None,
    centred: bool,
    stated: Sequence[float],
    allowed: float,
) -> Iterator[tuple[Kind, float]]:
    """Kinds and epsilons that give the vectors' lengths, those that fit best first."""
    size = vectors.shape[-1]
    if bias is not None:  # what is added is turned too: only the first token's lengths can be told
        vectors, cut, square = vectors[:, :1] - bias, cut[:, :1], square[:, :1]
    wanted, plain = (torch.linalg.vector_norm(part.double(), dim=-1) for part in (vectors, cut))
    limit, square = allowed * float(wanted.max()), square.double().expand_as(wanted)
    # At the shortest vector epsilon weighs most: read off any other, rounding would drown it.
    least = int(torch.where(plain > 0, square, torch.inf).argmin())
    kinds: tuple[Kind, ...] = ("layer",) if centred else ("rms", "l2")
    for kind in kinds:
        whole, found = square * _terms(kind, size), []
        measured = float((plain / wanted).flatten()[least].square() - whole.flatten()[least])
        rounded = [float(f"{measured:.1g}"), measured] if 0 < measured < torch.inf else []
        for epsilon in dict.fromkeys([*stated, *rounded]):
            apart = float((plain * (whole + epsilon).rsqrt() - wanted).abs().max())
            found += [(apart, epsilon)] if apart <= limit else []
        best = 4 * min(found, default=(0.0, 0.0))[0]
        for _, epsilon in sorted(found, key=lambda one: max(one[0], best))[:KEPT]:
            yield kind, epsilon
