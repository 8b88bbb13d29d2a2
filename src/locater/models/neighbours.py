"""Tensors beside the projections that no row reads: they may take part in the logits, so a scan says that they exist.

Sinks, scales of a quantiser, further norms, gates, relative tables: whatever lies in an attention module, in one of its
norms or, by its name, elsewhere in a layer, and is neither read by a row nor known to act behind the softmax.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..errors import missing
from .places import Places, Tensors
from .schema import NormAt, ask, resolve

# What acts on values or on what attention gives, and rotary tables that follow from the config.
BEHIND = re.compile(
    r"(v_proj|value|value_proj|v_lin|v|wv|o_proj|out_proj|out_lin|o|out|wo|Wo|dense|c_proj|linear_proj|LayerNorm|output|rotary_emb)\."
    r"|embed_positions$|proj_(weight|bias)$"
)
MASK = re.compile(r"(^|\.)(masked_)?bias$")  # the causal mask of older files: four dimensions, or the number behind it
# Words that mean a term of the logits wherever in a layer they stand.
TELLING = re.compile(r"sink|absmax|rel(ative)?_(pos|attention|bias|embed)|alibi|attn_scale|attention_scale|attn_bias")
# How people call the projection that makes queries, alone or with keys and values.
QUERY = re.compile(
    r"(^|\.)(q_proj|query|query_proj|wq|to_q|q_lin|qkv|qkv_proj|Wqkv|to_qkv|c_attn|query_key_value|att(entio)?n\.q)"
    r"\.weight$|(^|\.)in_proj_weight$"
)
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)")
# The columns of a row that name modules.
NAMED = ("query", "key", "input_norm", "key_input_norm", "query_norm", "key_norm", "query_low_rank", "key_low_rank")
NAMED += ("buckets", "sink")
NESTED = ("name", "norm", "down", "up")


@dataclass
class Surroundings:
    """The names that rows read, the modules where any other tensor may act on logits, and the layers that hold them."""

    read: set[str]
    modules: set[str]
    layers: set[str]

    @classmethod
    def of(cls, found: Sequence[Places]) -> "Surroundings":
        around = cls(set(), set(), set())
        for places in found:
            for layer in places.layers:
                _add(around, places, layer)
        return around

    def may_act(self, name: str, num_dimensions: int) -> bool:
        if name in self.read:
            return False
        inner = next((name[len(outer) + 1 :] for outer in outer_modules(name) if outer in self.modules), None)
        if inner is None:
            return TELLING.search(name) is not None and any(outer in self.layers for outer in outer_modules(name))
        return not BEHIND.match(inner) and not (MASK.search(inner) and num_dimensions in (0, 4))


def unknown_neighbours(around: Surroundings, tensors: Tensors) -> list[str]:
    """The tensors that may act on the logits of these rows and are read by none. Costs one pass over the names."""
    candidates = (name for name in tensors.names if around.may_act(name, 2))
    return [name for name in candidates if around.may_act(name, len(tensors.shape(name)))]


def unread_queries(around: Surroundings, names: Collection[str]) -> list[str]:
    """Tensors that by their name make queries, in attention that none of these rows is about."""
    queries = (name for name in names if QUERY.search(name) and name not in around.read)
    return sorted(name for name in queries if not _is_inside(name, around))


def _is_inside(name: str, around: Surroundings) -> bool:
    """Tell whether a row reads that attention module: what else lies in it is a neighbour, and reported as such."""
    return any(outer in around.modules for outer in outer_modules(name))


def uneven_layers(places: Places) -> str | None:
    """A bias that some layers have and others lack, in projections or norms, or a norm of another size: it was lost."""
    found: dict[str, dict[object, list[str]]] = {}
    for layer in places.layers:
        for column in NAMED:
            for pattern in _patterns(places, layer, (column,)):
                for module in _names(places, pattern, layer):
                    if weight := places.stored(module):
                        bias = places.stored(module, "bias")
                        found.setdefault(f"{column} {pattern}", {}).setdefault(bias is None, []).append(bias or module)
                        if column in ("query_norm", "key_norm"):
                            shape = places.tensors.shape(weight)
                            alike = f"{column} shape of {places.shape(layer)}"
                            found.setdefault(alike, {}).setdefault(shape, []).append(weight)
    uneven = (list(kinds.values()) for kinds in found.values() if len(kinds) > 1)
    return next((f"`{one[0][:120]}` has no like in `{other[0][:120]}`" for one, other, *_ in uneven), None)


def missing_layers(places: Places) -> tuple[list[int], list[int], list[int]]:
    """Layers without attention, layers that are not in the file at all, and layers beyond those of the config."""
    names = places.tensors.names
    held = {outer for name in names for outer in outer_modules(name)}
    without, absent = [], []
    for layer in sorted(set(range(places.num_layers)) - set(places.layers)):
        key = places.name(places.row.key, layer)
        if places.row.key != places.row.query and places.stored(key):
            query = places.name(places.row.query, layer)
            raise missing(f"a tensor `{query}.weight` beside `{key}.weight`", "the file is incomplete")
        (without if _layer_of(key) in held else absent).append(layer)
    further = places.config.get("num_nextn_predict_layers", 0)  # layers for further tokens, behind the model's own
    first = places.num_layers + (further if isinstance(further, int) else 0)
    return without, absent, [] if places.row.names else _beyond(places, first)


def _beyond(places: Places, first: int) -> list[int]:
    """Stored layers from this one on, among the numbers that stand in any name."""
    numbers = {int(number) for name in places.tensors.names for number in NUMBER.findall(name)}
    candidates = sorted(number for number in numbers if first <= number < first + 1000)
    return [layer for layer in candidates if places.stored(places.name(places.row.query, layer))]


def outer_modules(name: str) -> Iterator[str]:
    """The modules that hold a tensor, the innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def _add(around: Surroundings, places: Places, layer: int) -> None:
    modules = {name for pattern in _patterns(places, layer) for name in _names(places, pattern, layer)}
    for module in modules:
        around.read |= {name for kind in ("weight", "bias") if (name := places.stored(module, kind))}
    for pattern in (places.row.query, places.row.key):
        attention = places.name(pattern, layer).rpartition(".")[0]
        if attention and not attention.rpartition(".")[2].isdigit():
            around.modules.add(attention)
        around.layers.add(_layer_of(attention + "."))
    around.modules |= modules


def _names(places: Places, pattern: str, layer: int) -> Iterator[str]:
    for head in range(places.shape(layer).num_heads if "{head}" in pattern else 1):
        yield places.name(pattern, layer, head=head)


def _patterns(places: Places, layer: int, columns: tuple[str, ...] = NAMED) -> Iterator[str]:
    """Every pattern of the row, those of its norms and tables included."""
    here = (name for name in columns if name != "sink" or resolve(places.row.sink_only, places.config, layer))
    pending: list[Any] = [getattr(places.row, name, None) for name in here]
    while pending:
        cell = pending.pop()
        if isinstance(cell, str):
            yield cell
        elif isinstance(cell, NormAt):
            pending += [pattern for pattern in (cell.at(layer),) if pattern]
        elif is_dataclass(cell):
            pending += [getattr(cell, field.name) for field in fields(cell) if field.name in NESTED]
        elif callable(cell):
            pending.append(ask(cell, places.config, layer))


def _layer_of(name: str) -> str:
    found = LAYER.search(name)
    return name[: found.end()] if found else name
