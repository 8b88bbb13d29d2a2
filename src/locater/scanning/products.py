"""The Gram products of many heads, norms folded in.

Weights are widened and folded in one small buffer, a group of heads at a time: nothing as large as a layer is copied,
and what is multiplied is still in the cache.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from ..head import Head
from ..projections import Norm, Projection, widen
from ..spectra import Grams

ROWS_AT_ONCE = 256


class Linear:
    """norm(W x) as a matrix, its divisor taken at its root mean square over white x.

    What a norm over all heads needs of the whole projection, or an inner norm of the down projection, is summed once.
    """

    def __init__(self, *, raw: bool) -> None:
        self.raw = raw
        self.sums: dict[tuple[int, int], tuple[object, Tensor, Tensor]] = {}

    def apply(self, rows: Tensor, projection: Projection) -> None:
        """Change the folded rows (d_h, d) of the projection in place."""
        low_rank, norm = projection.low_rank, projection.norm
        if low_rank is not None and low_rank.norm is not None:
            inner = low_rank.norm
            if inner.kind == "layer":  # the mean is taken inside, between down and up
                rows.copy_((projection if self.raw else projection.folded()).linearised().detach())
                return
            _, square = self._shared(low_rank.down, projection)
            rows[: len(low_rank.up)] *= _factor(inner, square, len(low_rank.down))
        if norm is not None:
            self._outer(rows, norm, projection)

    def _outer(self, rows: Tensor, norm: Norm, projection: Projection) -> None:
        if projection.whole is None:
            centre, square, count = rows.mean(0), rows.square().sum(), len(rows)
        else:
            centre, square = self._shared(projection.whole.weight, projection)
            count = len(projection.whole.weight)
        if norm.kind == "layer":
            rows -= centre
            square = square - count * centre.square().sum()
        rows *= _factor(norm, square, count)
        if norm.gain is not None:
            rows *= norm.gain.detach().to(rows)[:, None]

    def _shared(self, weight: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """The mean row of a folded weight, and the sum of its squares."""
        norm = None if self.raw else projection.input_norm
        key = id(weight), id(norm)
        if key not in self.sums:
            self.sums[key] = (weight, norm), *_column_sums(weight, norm)  # held, so that no other takes their ids
        _, totals, square = self.sums[key]
        return totals / len(weight), square


def _column_sums(weight: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Sums down the columns of a folded weight, and the sum of all squares, some rows at a time."""
    totals = torch.zeros_like(widen(weight[0].detach()))
    square = torch.zeros_like(totals[0])
    for block in weight.detach().split(ROWS_AT_ONCE):
        block = widen(block).clone()
        _fold(block, norm)
        totals += block.sum(0)
        square += block.square().sum()
    return totals, square


def _factor(norm: Norm, square: Tensor, count: int) -> Tensor:
    return (square / (1 if norm.kind == "l2" else count) + norm.epsilon).rsqrt()


# Weights held in float32 at a time, and entries of each kind of Gram matrix analysed together.
BUFFER_BYTES = 16 * 2**20
GRAM_ENTRIES = 2**20


def chunks(heads: Sequence[Head], *, parts: int = 1) -> Iterator[list[list[Head]]]:
    """Groups of heads that share a key, as many at a time as the budget and one common shape allow.

    With `parts`, no chunk holds more than that share of the groups.
    """
    for _, alike in groupby(_groups(heads), key=lambda group: (len(group), group[0].d_head, group[0].d_model)):
        groups = list(alike)
        at_once = max(1, GRAM_ENTRIES // (len(groups[0]) * groups[0][0].d_head ** 2))
        at_once = min(at_once, -(-len(groups) // parts))
        for start in range(0, len(groups), at_once):
            yield groups[start : start + at_once]


def _groups(heads: Sequence[Head]) -> Iterator[list[Head]]:
    for _, group in groupby(heads, key=lambda head: (id(head.key), id(head.query.input_norm))):
        members = list(group)
        at_once = max(1, BUFFER_BYTES // (4 * members[0].query.weight.numel()) - 1)
        for start in range(0, len(members), at_once):
            yield members[start : start + at_once]


def products(groups: list[list[Head]], *, raw: bool, linear: Linear | None = None) -> Grams:
    """Core and query Gram as (groups, heads, d_h, d_h), key Gram as (groups, 1, d_h, d_h).

    `raw` takes the weights as stored, else the input norm's gain is folded in; `linear` puts the norms behind the
    projections into them.
    """
    return products_and_queries(groups, None, raw=raw, linear=linear)[0]


def products_and_queries(
    groups: list[list[Head]], x: Float[Tensor, "inputs d_model"] | None, *, raw: bool, linear: Linear | None = None
) -> tuple[Grams, Float[Tensor, "heads d_head inputs"]]:
    """`products`, and W_Q x of every head, biases apart: beside W_Q W_Q^T it costs little."""
    first, num_heads, size = groups[0][0], len(groups[0]), groups[0][0].d_head
    inputs = first.query.weight.new_empty(0, first.d_model) if x is None else x
    rows = _buffer((1 + num_heads) * size, first.query.weight, inputs)
    weights, inputs = rows.split([(1 + num_heads) * size, len(inputs)])
    buffer = weights.unflatten(0, (-1, size))
    with_key = buffer.new_empty(len(groups), size, (1 + num_heads) * size)
    with_query = buffer.new_empty(len(groups), num_heads, size, size + len(inputs))
    for number, group in enumerate(groups):
        _fill(buffer, group, raw=raw, linear=linear)
        torch.mm(buffer[0], weights.mT, out=with_key[number])
        _multiply_queries(buffer[1:], inputs, rows, out=with_query[number])
    blocks = with_key.unflatten(-1, (-1, size)).transpose(1, 2)
    grams = Grams(blocks[:, 1:].contiguous(), with_query[..., :size].contiguous(), blocks[:, :1].contiguous())
    return grams if raw else _amplified(grams, first), with_query[..., size:].flatten(0, 1)


def _multiply_queries(queries: Tensor, inputs: Tensor, rows: Tensor, *, out: Tensor) -> None:
    """Each by itself and by the inputs; a single one by both at once, since they lie behind it."""
    num_heads, size, _ = queries.shape
    if num_heads == 1:
        torch.mm(queries[0], rows[size:].mT, out=out[0])
    elif len(inputs) == 0:
        torch.bmm(queries, queries.mT, out=out)
    else:
        out[..., :size] = torch.bmm(queries, queries.mT)
        out[..., size:] = (queries.flatten(0, 1) @ inputs.mT).unflatten(0, (num_heads, size))


def _buffer(num_rows: int, weight: Tensor, inputs: Tensor) -> Tensor:
    """Room for so many rows, and then the inputs, in the order in which this weight is stored: transposing is slow."""
    dtype, width = widen(weight[:0]).dtype, weight.shape[1]
    stored_transposed = weight.stride(0) < weight.stride(1)
    shape = num_rows + len(inputs), width
    rows = torch.empty(shape[::-1], dtype=dtype).mT if stored_transposed else torch.empty(shape, dtype=dtype)
    rows[num_rows:] = inputs
    return rows


def _fill(buffer: Tensor, group: list[Head], *, raw: bool, linear: Linear | None) -> None:
    """The key, then the queries."""
    projections = [group[0].key, *(head.query for head in group)]
    for rows, projection in zip(buffer, projections, strict=True):
        rows.copy_(projection.weight.detach())
    if not raw:
        key_norm, query_norm = group[0].key.input_norm, group[0].query.input_norm
        if key_norm is query_norm:
            _fold(buffer, query_norm)
        else:
            _fold(buffer[:1], key_norm)
            _fold(buffer[1:], query_norm)
    if linear is not None:
        for rows, projection in zip(buffer, projections, strict=True):
            linear.apply(rows, projection)


def _fold(weights: Tensor, norm: Norm | None) -> None:
    """The gain, and a layer norm's centring: see `Norm.fold`."""
    if norm is not None and norm.gain is not None:
        weights *= norm.gain.detach().to(weights)
    if norm is not None and norm.kind == "layer":
        weights -= weights.mean(-1, keepdim=True)


def _amplified(grams: Grams, head: Head) -> Grams:
    """At offset 0 rotary positions do nothing but multiply the rows that turn by the amplitude."""
    if head.rotary is None or head.rotary.amplitude == 1:
        return grams
    rows = grams.core.new_ones(head.d_head)
    rows[head.rotary.pairs.flatten()] = head.rotary.amplitude
    return Grams(*(product * rows[:, None] * rows for product in grams))
