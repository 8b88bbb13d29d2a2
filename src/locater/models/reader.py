"""The one loop over all families: a table row, a config and named tensors make heads, layer by layer."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import Refusal, refusal, within
from ..head import Block, Head
from ..positions import Alibi, Buckets, PositionBias
from ..projections import is_finite
from .config import resolve
from .fused import rows_used
from .once import Once
from .places import Places
from .rope import rotary_of
from .sides import Side, read_norm


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
    for index in range(places.shape.num_heads):
        key_index = index // places.shape.ratio
        try:
            projections = query_side.projection(index), key_side.projection(key_index)
            bias = _position_bias(places, layer, index)
            heads.append(Head(layer, index, *projections, key_index=key_index, position_bias=bias, **shared))
        except Refusal as reason:
            place = f"{places.row.block} layer {layer}, head {index}: "
            refused.append(place + str(reason).removeprefix(place))  # a head that was made wrong says where it is
    names = (places.name(pattern, layer) for pattern in (places.row.query, places.row.key))
    return Layer(places.row.block, layer, tuple(heads), tuple(refused), *names)


def _shared(places: Places, layer: int) -> dict[str, Any]:
    """What is the same for all heads of a layer."""
    row, config, d_head = places.row, places.config, places.shape.d_head
    scale = resolve(row.scale, config, layer)
    return dict(
        scale=1 / math.sqrt(d_head) if scale is None else float(scale),
        block=row.block,
        rotary=rotary_of(row.rotary, config, layer=layer, d_head=d_head),
        softcap=resolve(row.softcap, config, layer),
        lookback=resolve(row.lookback, config, layer),
        lookahead=resolve(row.lookahead, config, layer),
    )


def read_sides(places: Places, layer: int) -> tuple[Side, Side]:
    """The two sides, from two tensors or from one that holds both."""
    row = places.row
    norm = read_norm(places, row.input_norm, layer)
    same = row.key_input_norm is None and row.block != "cross"
    key_norm = norm if same else read_norm(places, row.key_input_norm, layer)
    query_name, key_name = places.name(row.query, layer), places.name(row.key, layer)
    _check_rows(places, query_name, key=False)
    _check_rows(places, key_name, key=True)
    rows = rows_used(row.fused, places.shape) if row.fused else None
    query = places.weight(query_name, rows), places.bias(query_name, rows)
    key = query if row.fused else (places.weight(key_name), places.bias(key_name))
    finite = is_finite(query[0])
    key_finite = finite if row.fused else is_finite(key[0])
    return Side(places, layer, False, *query, norm, finite), Side(places, layer, True, *key, key_norm, key_finite)


def _check_rows(places: Places, module: str, *, key: bool) -> None:
    """A surplus of rows is as bad as a lack: head counts or sizes that are not the model's cut it in wrong places."""
    row, shape, name = places.row, places.shape, places.stored(module)
    if name is None or (row.key_low_rank if key else row.query_low_rank) is not None:
        return
    twice = row.values_behind if key else row.gated
    num_heads = (shape.num_key_heads if key else shape.num_heads) * (2 if twice else 1)
    expected = (shape.num_heads + 2 * shape.num_key_heads if row.fused else num_heads) * shape.d_head
    stored = places.tensors.shape(name)
    with_values = 2 * expected if key and row.block == "cross" else expected  # GPT-2 keeps both in one tensor there
    if stored[-1 if row.transposed else 0] not in (expected, with_values):
        counts = f"{shape.num_heads} heads, {shape.num_key_heads} key heads of {shape.d_head}"
        remedy = "the config and the weights disagree"
        raise refusal(f"{expected} rows in `{name}` ({counts})", "×".join(map(str, stored)), remedy)


def _position_bias(places: Places, layer: int, index: int) -> PositionBias | None:
    row = places.row
    if row.alibi is not None:
        slope = row.alibi(places.config, index)
        return None if slope is None else Alibi(slope)
    if row.buckets is not None:
        table = places.weight(places.name(row.buckets.name, layer))
        return Buckets(table[:, index], row.buckets.bidirectional, resolve(row.buckets.max_distance, places.config))
    return None
