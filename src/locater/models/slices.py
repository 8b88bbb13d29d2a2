"""Rows of the parameters that are a head's query, key and value: known from the layout before a weight is read."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from ..errors import Refusal, refusal, within
from ..head import Block
from ..positions import Rotary
from .config import ask, optional_number, whole_number
from .module import AttentionModule, HeadShape
from .rope import rotary_of
from .schema import Layout, LowRankAt, NormAt, NormCell, Starts

Part = Literal["query", "key", "value"]
CODEGEN = ("query", "value", "key")  # the order within each of its four blocks
DISAGREE = "the config and the weights disagree"


@dataclass(frozen=True)
class Latent:
    """The input of an up projection in latent attention: norm(down · x), `gain` the parameter of that norm.

    `direct` are rows of the down projection that every head takes as they are, after those of the up projection.
    """

    down: "Slice"
    gain: str | None
    direct: "Slice | None"
    norm: NormAt | None


@dataclass(frozen=True)
class Slice:
    """Rows `first` to `first + count` of a parameter; its columns where it is stored as (in, out)."""

    parameter: str
    first: int
    count: int
    transposed: bool = False
    latent: Latent | None = None

    @property
    def stop(self) -> int:
        return self.first + self.count

    def of(self, tensor: Float[Tensor, "..."]) -> Float[Tensor, "count columns"]:
        """These rows of the parameter, or of a gradient or a moment that is laid out like it: a view."""
        return (tensor.mT if self.transposed else tensor)[self.first : self.stop]


@dataclass(frozen=True)
class HeadRows:
    """Location of one head in the parameters; heads that share a key have equal `key` and `value`.

    `value` is None where the layout does not say it: then values are a parameter that no part of a logit comes from.
    In latent attention the rows are those of the up projections, and `latent` says what these are applied to.
    """

    block: Block
    layer: int
    head: int
    query: Slice
    key: Slice
    value: Slice | None


def slices(module: AttentionModule) -> tuple[HeadRows, ...]:
    """The rows of every head; reads names and shapes only. Refused where heads cannot be read."""
    if module.reason is not None:
        raise Refusal(f"{module.place}: {module.reason}")
    with within(module.place):
        row, shape = module.row, module.shape
        queries, keys = side_slices(module, key=False), side_slices(module, key=True)
        values = _values(module, keys[0])
        return tuple(
            HeadRows(row.block, module.number, head, queries[head], keys[group], values[group] if values else None)
            for head, group in ((head, head // shape.ratio) for head in range(shape.num_heads))
        )


def side_slices(module: AttentionModule, *, key: bool) -> tuple[Slice, ...]:
    """The rows of every query head, or of every key head."""
    row, shape = module.row, module.shape
    projection = module.key_name if key else module.query_name
    low_rank = row.key_low_rank if key else row.query_low_rank
    num_heads = shape.num_key_heads if key else shape.num_heads
    if low_rank is not None:
        return _latent_slices(module, projection, low_rank, num_heads=num_heads)
    _check_rows(module, projection, key=key)
    name = module.required(projection)
    transposed = row.transposed and len(module.tensors.shape(name)) == 2
    spacing = 2 if row.gated and not key else 1
    part = "key" if key else "query"
    starts = first_rows(row.fused, num_heads, shape, part)
    return tuple([Slice(name, spacing * start, shape.d_head, transposed) for start in starts])


def first_rows(layout: Layout | Starts | None, num_heads: int, shape: HeadShape, part: Part) -> list[int]:
    """First row of every query head, or of the key or value that a group shares.

    None: a tensor of its own. `qkv`: all queries, all keys, all values. `grouped`: group by group its
    queries, its key, its value; with one query per key that is q, k, v head by head. `codegen`: four blocks of q, v, k.
    """
    heads, ratio, d_head = range(num_heads), shape.ratio, shape.d_head
    if isinstance(layout, Starts):
        starts = layout.key if part == "key" else layout.query
        return [starts[head] for head in heads]
    if layout is None:
        return [head * d_head for head in heads]
    if layout == "qkv":
        before = {"query": 0, "key": shape.num_heads, "value": shape.num_heads + shape.num_key_heads}[part]
        return [(before + head) * d_head for head in heads]
    if layout == "grouped" and part == "query":
        return [(head // ratio * (ratio + 2) + head % ratio) * d_head for head in heads]
    if layout == "grouped":
        return [(group * (ratio + 2) + ratio + (part == "value")) * d_head for group in heads]
    per_block = shape.num_heads // 4
    inner = CODEGEN.index(part) * per_block
    return [(head // per_block * 3 * per_block + inner + head % per_block) * d_head for head in heads]


def _values(module: AttentionModule, key: Slice) -> tuple[Slice, ...] | None:
    """The value of every key head, where it lies in the same tensor as the key."""
    row, shape = module.row, module.shape
    groups = range(shape.num_key_heads)
    if row.key_low_rank is not None:
        spacing = whole_number(row.key_low_rank.per_head, module.config, "low-rank size")
        starts, size = (group * spacing + key.count for group in groups), spacing - key.count
        key = replace(key, latent=key.latent and replace(key.latent, direct=None))
    elif row.values_behind:
        starts, size = (len(groups) * key.count + group * key.count for group in groups), key.count
    elif row.fused is not None and not isinstance(row.fused, Starts):
        starts, size = first_rows(row.fused, len(groups), shape, "value"), key.count
    else:
        return None
    return tuple(Slice(key.parameter, start, size, key.transposed, key.latent) for start in starts) if size else None


def _latent_slices(module: AttentionModule, projection: str, at: LowRankAt, *, num_heads: int) -> tuple[Slice, ...]:
    """Rows of the up projection, each head's own; `latent` has those of the down projection."""
    rank, rows, per_head = (
        whole_number(cell, module.config, "low-rank size") for cell in (at.rank, at.rows, at.per_head)
    )
    d_head, transposed = module.shape.d_head, module.row.transposed
    up, down = module.required(module.name(at.up)), module.required(projection)
    if module.tensors.shape(up) != (num_heads * per_head, rank)[:: -1 if transposed else 1]:
        expected = [num_heads * per_head, rank]
        raise refusal(f"`{up}` of shape {expected}", [*module.tensors.shape(up)])
    stored = module.tensors.shape(down)
    num_direct = stored[-1 if transposed else 0] - rank
    if rows + num_direct != d_head:
        raise refusal(f"{d_head - rows + rank} rows in the low-rank projection", "×".join(map(str, stored)), DISAGREE)
    direct = Slice(down, rank, num_direct, transposed) if num_direct else None
    norm = norm_place(module, at.norm)
    gain = None if norm is None else module.stored(norm[1])
    latent = Latent(Slice(down, 0, rank, transposed), gain, direct, norm and norm[0])
    return tuple(Slice(up, head * per_head, rows, transposed, latent) for head in range(num_heads))


def norm_place(module: AttentionModule, cell: NormCell, *, head: int = 0) -> tuple[NormAt, str] | None:
    """A norm and the name of its module; None where the layer has none there."""
    at: NormAt | None = cell if isinstance(cell, NormAt | None) else ask(cell, module.config, module.number)
    if at is None or (pattern := at.at(module.number)) is None:
        return None
    name = module.name(pattern, head=head)
    return None if at.optional and module.stored(name) is None else (at, name)


def logit_scale(module: AttentionModule) -> float:
    """The factor of the product of query and key in a logit."""
    scale = optional_number(module.row.scale, module.config, "logits' scale", layer=module.number)
    return 1 / math.sqrt(module.shape.d_head) if scale is None else scale


def rotary(module: AttentionModule) -> Rotary | None:
    """The rotary positions of its heads."""
    return rotary_of(module.row.rotary, module.config, layer=module.number, d_head=module.shape.d_head)


def has_qk_norm(module: AttentionModule) -> bool:
    """Tell whether it has QK-norm."""
    return any(norm_place(module, cell) for cell in (module.row.query_norm, module.row.key_norm))


def num_columns(module: AttentionModule, rows: Slice) -> int:
    """Width of the input that these rows are applied to."""
    source = rows if rows.latent is None else rows.latent.down
    return module.tensors.shape(source.parameter)[0 if source.transposed else -1]


def _check_rows(module: AttentionModule, projection: str, *, key: bool) -> None:
    """A surplus of rows is as bad as a lack: head counts or sizes that are not the model's cut it in wrong places."""
    row, shape, name = module.row, module.shape, module.stored(projection)
    if name is None or isinstance(row.fused, Starts):
        return
    twice = row.values_behind if key else row.gated
    num_heads = (shape.num_key_heads if key else shape.num_heads) * (2 if twice else 1)
    expected = (shape.num_heads + 2 * shape.num_key_heads if row.fused else num_heads) * shape.d_head
    stored = module.tensors.shape(name)
    if len(stored) != 2:
        raise refusal(f"a matrix as `{name}`", f"shape {[*stored]}", "the file is damaged or of another family")
    if stored[-1 if row.transposed else 0] != expected:
        counts = f"{shape.num_heads} heads, {shape.num_key_heads} key heads of {shape.d_head}"
        raise refusal(f"{expected} rows in `{name}` ({counts})", "×".join(map(str, stored)), DISAGREE)
    width = stored[0 if row.transposed else -1]
    if module.knows_width and row.block != "cross" and width != module.width:
        raise refusal(f"{module.width} columns in `{name}`", width, DISAGREE)
