"""The query side or the key side of one attention module: its tensors read once, then cut into heads."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import refusal
from ..projections import LowRank, Norm, Projection, Whole, size
from .config import count, resolve
from .fused import first_row
from .places import Places
from .schema import LowRankAt, NormCell


def read_norm(places: Places, at: NormCell, layer: int, *, head: int = 0) -> Norm | None:
    """The norm at a place, with its whole gain; None where the layer has none there."""
    at = at(places.config, layer) if callable(at) else at
    if at is None or (pattern := at.at(layer)) is None:
        return None
    name = places.name(pattern, layer, head=head)
    if at.optional and places.stored(name) is None:
        return None
    epsilon = float(resolve(at.epsilon, places.config, layer))
    if at.plain or (at.kind == "l2" and places.stored(name) is None):
        return Norm(at.kind, epsilon=epsilon)
    gain, bias = places.weight(name).flatten(), places.bias(name)
    gain = 1 + gain.float() if at.plus_one else gain
    bias = None if bias is None else bias.flatten()
    if (times := float(resolve(at.times, places.config, layer))) != 1:
        gain, bias = times * gain.float(), None if bias is None else times * bias.float()
    return Norm(at.bare if at.bare and bias is None else at.kind, gain, bias, epsilon)


@dataclass(frozen=True)
class Side:
    """`projection(i)` is query head i, or key head i; key heads are made once and shared by their group."""

    places: Places
    layer: int
    key: bool
    weight: Tensor
    bias: Tensor | None
    input_norm: Norm | None
    known_finite: bool  # of all heads at once; where it is false each is looked at by itself
    made: dict[int, Projection] = field(default_factory=dict)
    downs: dict[int, Tensor] = field(default_factory=dict)

    def projection(self, index: int) -> Projection:
        if index not in self.made:
            low_rank = self.places.row.key_low_rank if self.key else self.places.row.query_low_rank
            self.made[index] = self._direct(index) if low_rank is None else self._low_rank(index, low_rank)
        return self.made[index]

    def _direct(self, index: int) -> Projection:
        row, shape = self.places.row, self.places.shape
        start = first_row(row.fused, index, shape, key=self.key) * (2 if row.gated and not self.key else 1)
        rows = slice(start, start + shape.d_head)
        if len(self.weight) < rows.stop:
            num_heads = shape.num_key_heads if self.key else shape.num_heads
            expected = f"{num_heads} heads of {shape.d_head} rows"
            raise refusal(expected, size(self.weight), "the config and the weights disagree")
        bias = None if self.bias is None else self.bias[rows]
        projection = Projection(self.weight[rows], bias, self.input_norm, known_finite=self.known_finite)
        norm = read_norm(self.places, row.key_norm if self.key else row.query_norm, self.layer, head=index)
        return self._normed(projection, norm, index)

    def _normed(self, projection: Projection, norm: Norm | None, index: int) -> Projection:
        """QK-norm: its gain may be one for all heads, or hold this head's part."""
        if norm is None:
            return projection
        d_head = len(projection.weight)
        if norm.gain is not None and len(norm.gain) > d_head:
            rows = slice(index * d_head, (index + 1) * d_head)
            norm = replace(norm, gain=norm.gain[rows], bias=None if norm.bias is None else norm.bias[rows])
        whole = self._whole if self.places.row.norm_over == "projection" else None
        return replace(projection, norm=norm, whole=whole)

    @cached_property
    def _whole(self) -> Whole:
        """All heads' rows of this side, picked out where one tensor holds more than them."""
        row, shape = self.places.row, self.places.shape
        if row.fused is None:
            return Whole(self.weight, self.bias)
        num_heads = shape.num_key_heads if self.key else shape.num_heads
        starts = torch.tensor([first_row(row.fused, head, shape, key=self.key) for head in range(num_heads)])
        rows = (starts[:, None] + torch.arange(shape.d_head)).flatten()
        return Whole(self.weight[rows], None if self.bias is None else self.bias[rows])

    def _down(self, rank: int) -> Tensor:
        """One tensor for all heads, by which they can be seen to share it."""
        return self.downs.setdefault(rank, self.weight[:rank])

    def _low_rank(self, index: int, at: LowRankAt) -> Projection:
        """Rows through the inner norm first, then those that the down projection gives directly to every head."""
        places, config = self.places, self.places.config
        rank, rows, per_head = (count(cell, config, "low-rank size") for cell in (at.rank, at.rows, at.per_head))
        up = places.weight(places.name(at.up, self.layer), (index * per_head, index * per_head + rows))
        norm = read_norm(places, at.norm, self.layer)
        low_rank = LowRank(self._down(rank), up, norm, None if self.bias is None else self.bias[:rank])
        direct = self.weight[rank:]
        bias = None if self.bias is None else torch.cat([up.new_zeros(rows), self.bias[rank:].to(up)])
        weight = torch.cat([low_rank.weight, direct.to(low_rank.weight.dtype)])
        return Projection(weight, bias, self.input_norm, low_rank=low_rank)
