"""The one loop over all families: a table row, a config and named tensors make heads, layer by layer."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import Refusal, refusal, within
from ..head import Head, label
from ..positions import Alibi, Buckets, PositionBias
from ..projections import LowRank, Norm, Projection, Whole, is_finite, size
from .config import ask, finite_number, optional_number, optional_whole_number, resolve, whole_number
from .module import AttentionModule
from .schema import NormCell
from .slices import Latent, Slice, logit_scale, norm_place, rotary, side_slices
from .tensors import Once


def read_norm(module: AttentionModule, cell: NormCell, *, head: int = 0) -> Norm | None:
    """The norm at a place, with its whole gain; None where the layer has none there."""
    if (place := norm_place(module, cell, head=head)) is None:
        return None
    at, name = place
    epsilon = finite_number(at.epsilon, module.config, "norm's epsilon", layer=module.number)
    if at.plain or (at.kind == "l2" and module.stored(name) is None):
        return Norm(at.kind, epsilon=epsilon)
    gain, bias = module.weight(name).flatten(), module.bias(name)
    gain = 1 + gain.float() if at.plus_one else gain
    bias = None if bias is None else bias.flatten()
    if (times := finite_number(at.times, module.config, "norm's multiple", layer=module.number)) != 1:
        gain, bias = times * gain.float(), None if bias is None else times * bias.float()
    return Norm(at.bare if at.bare and bias is None else at.kind, gain, bias, epsilon)


def _check_finite(what: str, values: Tensor | None) -> None:
    """Refuse NaN, which would pass as a number further on."""
    if values is not None and not is_finite(values):
        raise refusal(what, "NaN or infinity", "the checkpoint is damaged or diverged")


@dataclass(frozen=True)
class Projections:
    """The projections of all query heads, or of all key heads: what they share is read once."""

    module: AttentionModule
    key: bool
    slices: tuple[Slice, ...]
    weight: Tensor
    bias: Tensor | None
    input_norm: Norm | None
    known_finite: bool  # of all heads at once; where it is false each is looked at by itself
    downs: dict[int, Tensor] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Projection:
        at = self.slices[index]
        if at.latent is not None:
            return self._low_rank(index, at.latent)
        rows = slice(at.first, at.first + at.count)
        if self.weight.shape[0] < rows.stop:
            expected = f"{len(self.slices)} heads of {at.count} rows"
            raise refusal(expected, size(self.weight), "the config and the weights disagree")
        bias = None if self.bias is None else self.bias[rows]
        if not self._has_finite_vectors:
            self._check_vectors(bias)
        norm = None if self._norm_cell is None else self._norm(index, at.count)
        whole = None if norm is None or self.module.row.norm_over != "projection" else self._whole
        return Projection(self.weight[rows], bias, self.input_norm, norm, whole, known_finite=self.known_finite)

    def _check_vectors(self, bias: Tensor | None) -> None:
        _check_finite("a finite bias", bias)
        if (norm := self.input_norm) is not None:
            _check_finite("a finite gain of the input norm", norm.gain)
            _check_finite("a finite bias of the input norm", norm.bias)

    @cached_property
    def _has_finite_vectors(self) -> bool:
        """Tell whether the vectors of all heads are finite; where they are not, each is looked at by itself."""
        norm = self.input_norm
        vectors = (self.bias, norm and norm.gain, norm and norm.bias)
        return all(vector is None or is_finite(vector) for vector in vectors)

    @cached_property
    def _norm_cell(self) -> NormCell:
        return self.module.row.key_norm if self.key else self.module.row.query_norm

    @cached_property
    def _common_norm(self) -> tuple[bool, Norm | None]:
        """Return whether one norm serves all heads, and that norm, if finite; some models have one per head."""
        first, second = (norm_place(self.module, self._norm_cell, head=head) for head in (0, 1))
        norm = read_norm(self.module, self._norm_cell) if first == second else None
        vectors = () if norm is None else (norm.gain, norm.bias)
        return first == second and all(vector is None or is_finite(vector) for vector in vectors), norm

    def _norm(self, index: int, d_head: int) -> Norm | None:
        """QK-norm: its gain may be one for all heads, or hold this head's part."""
        is_common, norm = self._common_norm
        norm = norm if is_common else read_norm(self.module, self._norm_cell, head=index)
        if norm is None or norm.gain is None:
            return norm
        if (place := norm_place(self.module, self._norm_cell)) is not None and place[0].single:
            return replace(norm, gain=self._single(norm.gain, index).expand(d_head))
        num_numbers, num_all = norm.gain.shape[0], d_head * len(self.slices)
        sizes = (num_all,) if self.module.row.norm_over == "projection" else (d_head, num_all)
        if num_numbers not in sizes:
            raise refusal(f"a gain of {' or '.join(map(str, sizes))} numbers", num_numbers)
        if num_numbers > d_head:
            rows = slice(index * d_head, (index + 1) * d_head)
            norm = replace(norm, gain=norm.gain[rows], bias=None if norm.bias is None else norm.bias[rows])
        if not is_common:
            _check_finite("a finite gain of the head's norm", norm.gain)
            _check_finite("a finite bias of the head's norm", norm.bias)
        return norm

    def _single(self, gain: Tensor, index: int) -> Tensor:
        """The number that multiplies one head: the only one, or this head's."""
        if len(gain) not in (1, len(self.slices)):
            raise refusal(f"a gain of 1 or {len(self.slices)} numbers", len(gain))
        return gain[:1] if len(gain) == 1 else gain[index : index + 1]

    @cached_property
    def _whole(self) -> Whole:
        """All heads' rows of this side, picked out where one tensor holds more than them."""
        if self.module.row.fused is None:
            return Whole(self.weight, self.bias)
        rows = torch.cat([torch.arange(at.first, at.stop) for at in self.slices])
        return Whole(self.weight[rows], None if self.bias is None else self.bias[rows])

    def _low_rank(self, index: int, latent: Latent) -> Projection:
        """Rows through the inner norm first, then those that the down projection gives directly to every head."""
        module, rank, at = self.module, latent.down.count, self.slices[index]
        low_rank = module.row.key_low_rank if self.key else module.row.query_low_rank
        assert low_rank is not None
        up = module.weight(module.name(low_rank.up), (at.first, at.stop))
        norm = read_norm(module, low_rank.norm)
        if norm is not None and norm.gain is not None and len(norm.gain) != rank:
            raise refusal(f"a gain of {rank} numbers", len(norm.gain))
        if not self._has_finite_vectors:
            self._check_vectors(self.bias)
        down = self.downs.setdefault(rank, self.weight[:rank])  # one tensor: heads can be seen to share it
        parts = LowRank(down, up, norm, None if self.bias is None else self.bias[:rank])
        bias = None if self.bias is None else torch.cat([up.new_zeros(at.count), self.bias[rank:].to(up)])
        weight = torch.cat([parts.weight, self.weight[rank:].to(parts.weight.dtype)])
        return Projection(weight, bias, self.input_norm, low_rank=parts)


def read_heads(module: AttentionModule) -> AttentionModule:
    """The module with its heads as they are now: its tensors are read and cut."""
    if module.reason is not None:
        return replace(module, refused=(f"{module.place}: {module.reason}",))
    tensors = module.tensors if isinstance(module.tensors, Once) else Once(module.tensors)
    tensors.begin(module.query_name)
    with within(module.place):
        heads, refused = _heads(replace(module, tensors=tensors))
    return replace(module, heads=tuple(heads), refused=tuple(refused))


def _heads(module: AttentionModule) -> tuple[list[Head], list[str]]:
    """The heads that can be made, and why others cannot."""
    queries, key_heads = read_projections(module)
    shared = _shared(module)
    heads, refused = [], []
    keys: dict[int, Projection] = {}  # made once and shared by their group
    row, ratio, layer = module.row, module.shape.ratio, module.number
    has_bias = row.alibi is not None or row.buckets is not None
    has_sink = row.sink is not None and resolve(row.sink_only, module.config, layer)
    for index in range(len(queries.slices)):
        key_index = index // ratio
        try:
            query = queries[index]
            key = keys[key_index] = keys.get(key_index) or key_heads[key_index]
            bias = _position_bias(module, index) if has_bias else None
            sink = _sink(module, index) if has_sink else None
            heads.append(Head(layer, index, query, key, key_index=key_index, position_bias=bias, sink=sink, **shared))
        except Refusal as reason:
            place = label(row.block, layer, index) + ": "
            refused.append(place + str(reason).removeprefix(place))  # a head that was made wrong says where it is
    return heads, refused


def _shared(module: AttentionModule) -> dict[str, Any]:
    """Fields that all heads of a layer share."""
    row, config = module.row, module.config
    return dict(
        scale=logit_scale(module),
        block=row.block,
        turns_first=row.turns_first,
        rotary=rotary(module),
        softcap=optional_number(row.softcap, config, "soft-cap", layer=module.number),
        lookback=optional_whole_number(row.lookback, config, "window", layer=module.number),
        lookahead=optional_whole_number(row.lookahead, config, "look ahead", layer=module.number),
    )


def read_projections(module: AttentionModule) -> tuple[Projections, Projections]:
    """Queries and keys, from two tensors or from one that holds both."""
    row = module.row
    norm = read_norm(module, row.input_norm)
    same = row.key_input_norm is None and row.block != "cross"
    key_norm = norm if same else read_norm(module, row.key_input_norm)
    query_name, key_name = module.query_name, module.key_name
    queries, keys = side_slices(module, key=False), side_slices(module, key=True)
    shared = query_name == key_name and row.fused is not None
    stop = max([at.first + at.count for at in (*queries, *keys)])
    rows = (0, stop) if shared else None  # values after the last key are not read
    query = module.weight(query_name, rows), module.bias(query_name, rows)
    key = query if shared else (module.weight(key_name), module.bias(key_name))
    _check_norm(norm, query[0].shape[-1])
    _check_norm(key_norm, key[0].shape[-1])
    finite = is_finite(query[0])
    key_finite = finite if shared else is_finite(key[0])
    query_heads = Projections(module, False, queries, *query, norm, finite)
    return query_heads, Projections(module, True, keys, *key, key_norm, key_finite)


def _check_norm(norm: Norm | None, width: int) -> None:
    if norm is not None and norm.gain is not None and len(norm.gain) != width:
        raise refusal(f"{width} numbers as the gain of the input norm", len(norm.gain))


def _position_bias(module: AttentionModule, index: int) -> PositionBias | None:
    row, buckets = module.row, module.row.buckets
    if row.alibi is not None or buckets is None:
        slope = None if row.alibi is None else ask(row.alibi, module.config, index)
        return None if slope is None else Alibi(slope)
    name = module.name(buckets.name)
    table = module.weight(name)
    _check_finite(f"finite numbers in `{name}`", table)
    expected = [whole_number(buckets.num_buckets, module.config, "number of buckets"), module.shape.num_heads]
    if [*table.shape] != expected:
        raise refusal(f"a table of {expected} as `{name}`", [*table.shape])
    farthest = whole_number(buckets.max_distance, module.config, "largest bucketed distance")
    nearest = expected[0] // (4 if buckets.bidirectional else 2)  # distances with a bucket of their own
    if farthest <= nearest:
        raise refusal(f"a largest bucketed distance above {nearest}", farthest)
    return Buckets(table[:, index], buckets.bidirectional, farthest)


def _sink(module: AttentionModule, index: int) -> Tensor:
    """This head's entry of the sinks' tensor, which holds one for each head in whatever shape."""
    name = module.name(module.row.sink or "")
    sinks = module.weight(name).flatten()
    if len(sinks) != (num_heads := module.shape.num_heads):
        raise refusal(f"{num_heads} sinks in `{name}`", len(sinks))
    return sinks[index]
