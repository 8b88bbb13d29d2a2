"""The one loop over all families: a table row, a config and named tensors make heads, layer by layer."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import Refusal, refusal, within
from ..head import Block, Head, label
from ..positions import Alibi, Buckets, PositionBias
from ..projections import LowRank, Norm, Projection, Whole, is_finite, size
from .places import Once, Places, Shape, first_row, rows_used
from .rope import rotary_of
from .schema import LowRankAt, NormAt, NormCell, Starts, ask, count, number, optional_count, optional_number, resolve


def read_norm(places: Places, cell: NormCell, layer: int, *, head: int = 0) -> Norm | None:
    """The norm at a place, with its whole gain; None where the layer has none there."""
    at: NormAt | None = cell if isinstance(cell, NormAt | None) else ask(cell, places.config, layer)
    if at is None or (pattern := at.at(layer)) is None:
        return None
    name = places.name(pattern, layer, head=head)
    if at.optional and places.stored(name) is None:
        return None
    epsilon = number(at.epsilon, places.config, "norm's epsilon", layer=layer)
    if at.plain or (at.kind == "l2" and places.stored(name) is None):
        return Norm(at.kind, epsilon=epsilon)
    gain, bias = places.weight(name).flatten(), places.bias(name)
    gain = 1 + gain.float() if at.plus_one else gain
    bias = None if bias is None else bias.flatten()
    if (times := number(at.times, places.config, "norm's multiple", layer=layer)) != 1:
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

    @property
    def shape(self) -> Shape:
        return self.places.shape(self.layer)

    def projection(self, index: int) -> Projection:
        if index not in self.made:
            low_rank = self.places.row.key_low_rank if self.key else self.places.row.query_low_rank
            self.made[index] = self._direct(index) if low_rank is None else self._low_rank(index, low_rank)
        return self.made[index]

    def _direct(self, index: int) -> Projection:
        row, shape = self.places.row, self.shape
        start = first_row(row.fused, index, shape, key=self.key) * (2 if row.gated and not self.key else 1)
        rows = slice(start, start + shape.d_head)
        if len(self.weight) < rows.stop:
            num_heads = shape.num_key_heads if self.key else shape.num_heads
            expected = f"{num_heads} heads of {shape.d_head} rows"
            raise refusal(expected, size(self.weight), "the config and the weights disagree")
        bias = None if self.bias is None else self.bias[rows]
        self._check_vectors(bias)
        projection = Projection(self.weight[rows], bias, self.input_norm, known_finite=self.known_finite)
        norm = read_norm(self.places, row.key_norm if self.key else row.query_norm, self.layer, head=index)
        return self._normed(projection, norm, index)

    def _check_vectors(self, bias: Tensor | None) -> None:
        """Refuse NaN, which would pass as a number further on, in a head's bias and in the input norm."""
        if self._has_finite_vectors:
            return
        norm = self.input_norm
        named = {
            "bias": bias,
            "gain of the input norm": norm and norm.gain,
            "bias of the input norm": norm and norm.bias,
        }
        for what, values in named.items():
            if values is not None and not is_finite(values):
                raise refusal(f"a finite {what}", "NaN or infinity", "the checkpoint is damaged or diverged")

    @cached_property
    def _has_finite_vectors(self) -> bool:
        """Of all heads at once; where it is false each is looked at by itself."""
        norm = self.input_norm
        vectors = (self.bias, norm and norm.gain, norm and norm.bias)
        return all(vector is None or is_finite(vector) for vector in vectors)

    def _normed(self, projection: Projection, norm: Norm | None, index: int) -> Projection:
        """QK-norm: its gain may be one for all heads, or hold this head's part."""
        if norm is None:
            return projection
        d_head, num_heads = len(projection.weight), self._num_heads
        if norm.gain is not None and len(norm.gain) not in (d_head, d_head * num_heads):
            raise refusal(f"a gain of {d_head} or {d_head * num_heads} numbers", len(norm.gain))
        if norm.gain is not None and len(norm.gain) > d_head:
            rows = slice(index * d_head, (index + 1) * d_head)
            norm = replace(norm, gain=norm.gain[rows], bias=None if norm.bias is None else norm.bias[rows])
        for what, values in (("gain", norm.gain), ("bias", norm.bias)):
            if values is not None and not is_finite(values):
                raise refusal(f"a finite {what} of the head's norm", "NaN or infinity", "the checkpoint is damaged")
        whole = self._whole if self.places.row.norm_over == "projection" else None
        return replace(projection, norm=norm, whole=whole)

    @cached_property
    def _whole(self) -> Whole:
        """All heads' rows of this side, picked out where one tensor holds more than them."""
        row, shape = self.places.row, self.shape
        if row.fused is None:
            return Whole(self.weight, self.bias)
        num_heads = shape.num_key_heads if self.key else shape.num_heads
        starts = torch.tensor([first_row(row.fused, head, shape, key=self.key) for head in range(num_heads)])
        rows = (starts[:, None] + torch.arange(shape.d_head)).flatten()
        return Whole(self.weight[rows], None if self.bias is None else self.bias[rows])

    @property
    def _num_heads(self) -> int:
        return self.shape.num_key_heads if self.key else self.shape.num_heads

    def _down(self, rank: int) -> Tensor:
        """One tensor for all heads, by which they can be seen to share it."""
        return self.downs.setdefault(rank, self.weight[:rank])

    def _low_rank(self, index: int, at: LowRankAt) -> Projection:
        """Rows through the inner norm first, then those that the down projection gives directly to every head."""
        places, config = self.places, self.places.config
        rank, rows, per_head = (count(cell, config, "low-rank size") for cell in (at.rank, at.rows, at.per_head))
        up_name = places.name(at.up, self.layer)
        _check_up(places, up_name, (self._num_heads * per_head, rank))
        up = places.weight(up_name, (index * per_head, index * per_head + rows))
        norm = read_norm(places, at.norm, self.layer)
        if norm is not None and norm.gain is not None and len(norm.gain) != rank:
            raise refusal(f"a gain of {rank} numbers", len(norm.gain))
        if rows + len(self.weight) - rank != self.shape.d_head:
            expected = f"{self.shape.d_head - rows + rank} rows in the low-rank projection"
            raise refusal(expected, size(self.weight), "the config and the weights disagree")
        self._check_vectors(self.bias)
        low_rank = LowRank(self._down(rank), up, norm, None if self.bias is None else self.bias[:rank])
        direct = self.weight[rank:]
        bias = None if self.bias is None else torch.cat([up.new_zeros(rows), self.bias[rank:].to(up)])
        weight = torch.cat([low_rank.weight, direct.to(low_rank.weight.dtype)])
        return Projection(weight, bias, self.input_norm, low_rank=low_rank)


@dataclass(frozen=True)
class Layer:
    """The heads of one attention module, and the modules whose input they take.

    A head that could not be made is a sentence in `refused`; the others are still there.
    """

    block: Block
    number: int
    heads: tuple[Head, ...]
    refused: tuple[str, ...]
    query_name: str
    key_name: str


def build(places: Places, layers: Iterable[int]) -> Iterator[Layer]:
    """The layers asked for, one at a time: only one layer's tensors are held at once."""
    stored = held = None
    for layer in layers:
        name = places.name(places.row.query, layer)
        if held is None or name != stored:  # ALBERT's layers are one and the same
            stored, held = name, replace(places, tensors=Once(places.tensors))
        with within(f"{places.row.block} layer {layer}"):
            yield build_layer(held, layer)


def build_layer(places: Places, layer: int) -> Layer:
    """Read one layer's tensors and cut them into heads."""
    query_side, key_side = read_sides(places, layer)
    shared = _shared(places, layer)
    heads, refused = [], []
    shape = places.shape(layer)
    for index in range(shape.num_heads):
        key_index = index // shape.ratio
        try:
            projections = query_side.projection(index), key_side.projection(key_index)
            own = dict(position_bias=_position_bias(places, layer, index), sink=_sink(places, layer, index))
            heads.append(Head(layer, index, *projections, key_index=key_index, **own, **shared))
        except Refusal as reason:
            place = label(places.row.block, layer, index) + ": "
            refused.append(place + str(reason).removeprefix(place))  # a head that was made wrong says where it is
    names = (places.name(pattern, layer) for pattern in (places.row.query, places.row.key))
    return Layer(places.row.block, layer, tuple(heads), tuple(refused), *names)


def _shared(places: Places, layer: int) -> dict[str, Any]:
    """What is the same for all heads of a layer."""
    row, config, d_head = places.row, places.config, places.shape(layer).d_head
    scale = optional_number(row.scale, config, "logits' scale", layer=layer)
    return dict(
        scale=1 / math.sqrt(d_head) if scale is None else scale,
        block=row.block,
        turns_first=row.turns_first,
        rotary=rotary_of(row.rotary, config, layer=layer, d_head=d_head),
        softcap=optional_number(row.softcap, config, "soft-cap", layer=layer),
        lookback=optional_count(row.lookback, config, "window", layer=layer),
        lookahead=optional_count(row.lookahead, config, "look ahead", layer=layer),
    )


def read_sides(places: Places, layer: int) -> tuple[Side, Side]:
    """The two sides, from two tensors or from one that holds both."""
    row = places.row
    norm = read_norm(places, row.input_norm, layer)
    same = row.key_input_norm is None and row.block != "cross"
    key_norm = norm if same else read_norm(places, row.key_input_norm, layer)
    query_name, key_name = places.name(row.query, layer), places.name(row.key, layer)
    _check_rows(places, query_name, layer, key=False)
    _check_rows(places, key_name, layer, key=True)
    shared = query_name == key_name and row.fused is not None
    rows = rows_used(row.fused, places.shape(layer)) if shared and row.fused is not None else None
    query = places.weight(query_name, rows), places.bias(query_name, rows)
    key = query if shared else (places.weight(key_name), places.bias(key_name))
    _check_norm(norm, query[0].shape[-1])
    _check_norm(key_norm, key[0].shape[-1])
    finite = is_finite(query[0])
    key_finite = finite if shared else is_finite(key[0])
    return Side(places, layer, False, *query, norm, finite), Side(places, layer, True, *key, key_norm, key_finite)


def _check_up(places: Places, module: str, expected: tuple[int, int]) -> None:
    name = places.stored(module)
    if name is not None and places.tensors.shape(name) != expected:
        raise refusal(f"`{name}` of shape {[*expected]}", [*places.tensors.shape(name)])


def _check_norm(norm: Norm | None, width: int) -> None:
    if norm is not None and norm.gain is not None and len(norm.gain) != width:
        raise refusal(f"{width} numbers as the gain of the input norm", len(norm.gain))


def _check_rows(places: Places, module: str, layer: int, *, key: bool) -> None:
    """A surplus of rows is as bad as a lack: head counts or sizes that are not the model's cut it in wrong places."""
    row, shape, name = places.row, places.shape(layer), places.stored(module)
    if name is None or (row.key_low_rank if key else row.query_low_rank) is not None or isinstance(row.fused, Starts):
        return
    twice = row.values_behind if key else row.gated
    num_heads = (shape.num_key_heads if key else shape.num_heads) * (2 if twice else 1)
    expected = (shape.num_heads + 2 * shape.num_key_heads if row.fused else num_heads) * shape.d_head
    stored = places.tensors.shape(name)
    if len(stored) != 2:
        raise refusal(f"a matrix as `{name}`", f"shape {[*stored]}", "the file is damaged or of another family")
    if stored[-1 if row.transposed else 0] != expected:
        counts = f"{shape.num_heads} heads, {shape.num_key_heads} key heads of {shape.d_head}"
        remedy = "the config and the weights disagree"
        raise refusal(f"{expected} rows in `{name}` ({counts})", "×".join(map(str, stored)), remedy)
    width = stored[0 if row.transposed else -1]
    if places.knows_width and row.block != "cross" and width != places.width:
        raise refusal(f"{places.width} columns in `{name}`", width, "the config and the weights disagree")


def _position_bias(places: Places, layer: int, index: int) -> PositionBias | None:
    row = places.row
    if row.alibi is not None:
        slope = ask(row.alibi, places.config, index)
        return None if slope is None else Alibi(slope)
    if row.buckets is not None:
        name = places.name(row.buckets.name, layer)
        table = places.finite(name, places.weight(name))
        expected = [count(row.buckets.num_buckets, places.config, "number of buckets"), places.shape(layer).num_heads]
        if [*table.shape] != expected:
            raise refusal(f"a table of {expected} as `{name}`", [*table.shape])
        farthest = count(row.buckets.max_distance, places.config, "largest bucketed distance")
        nearest = expected[0] // (4 if row.buckets.bidirectional else 2)  # distances with a bucket of their own
        if farthest <= nearest:
            raise refusal(f"a largest bucketed distance above {nearest}", farthest)
        return Buckets(table[:, index], row.buckets.bidirectional, farthest)
    return None


def _sink(places: Places, layer: int, index: int) -> Tensor | None:
    """This head's entry of the sinks' tensor, which holds one for each head in whatever shape."""
    if places.row.sink is None or not resolve(places.row.sink_only, places.config, layer):
        return None
    name = places.name(places.row.sink, layer)
    sinks = places.weight(name).flatten()
    if len(sinks) != (num_heads := places.shape(layer).num_heads):
        raise refusal(f"{num_heads} sinks in `{name}`", len(sinks))
    return sinks[index]
