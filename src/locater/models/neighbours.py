"""Tensors beside the projections that no row reads: they may take part in the logits, so a scan says that they exist.

Sinks, scales of a quantiser, further norms, gates, relative tables: whatever lies in an attention module, in one of its
norms or, by its name, elsewhere in a layer, and is neither read by a row nor known to act behind the softmax. And
biases and norms that a row expects: what is lost in all layers looks as if it never was, so the row must say it.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from ..errors import missing
from ..records import Json, parse_json
from .config import ask, resolve
from .module import AttentionModule, Stack
from .schema import Family, NormAt
from .tensors import Tensors

# What acts on values or on what attention gives, and rotary tables that follow from the config.
BEHIND = re.compile(
    r"(v_proj|value|value_proj|v_lin|v|wv|o_proj|out_proj|out_lin|o|out|wo|Wo|dense|c_proj|linear_proj|LayerNorm|output|rotary_emb)\."
    r"|embed_positions$|proj_(weight|bias)$"
)
MASK = re.compile(r"(^|\.)(masked_)?bias$")  # the causal mask of older files: four dimensions, or the number behind it
TABLE = re.compile(r"(^|\.)(rotary_emb\.(\w+_)?(inv_freq|cached)|position_ids)$")  # older files': from the config
# Words that mean a term of the logits beside all layers, and in families without a list wherever in a layer.
TELLING = re.compile(
    r"sink|absmax|rel(ative)?_(pos|attention|bias|embed)|alibi|attn_scale|attention_scale|attn_bias|temperature"
    r"|pos(ition)?_bias|attention_rotation|(^|[._])(qk|q|k)_(shift|scale|gain|temp|norm|ln|layernorm)"
    r"|(norm|ln)_(qk|q|k)([._]|$)"
)
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
    lists: set[str]  # that the layers are in
    named: set[str]  # those of the modules that are projections and norms themselves
    prefixes: set[str]

    @classmethod
    def of(cls, found: Iterable[AttentionModule]) -> "Surroundings":
        around = cls(*(set() for _ in fields(cls)))
        for module in found:
            _add(around, module)
        return around

    def inside(self, name: str) -> str | None:
        """The name of a tensor within the innermost of the modules that holds it; None where it is in none."""
        return next((name[len(outer) + 1 :] for outer in outer_modules(name) if outer in self.modules), None)


def unknown_neighbours(around: Surroundings, tensors: Tensors, family: Family) -> list[str]:
    """The tensors that may act on the logits of these rows and are read by none. Costs one pass over the names."""
    acts = _acts_by_list if known(family) else _acts_by_name
    around.prefixes |= {prefix for row in family.attention for prefix in row.prefixes or ()}

    def may_act(name: str) -> bool:
        inner = around.inside(name)
        is_mask = inner is not None and MASK.search(inner) is not None and len(tensors.shape(name)) in (0, 4)
        return not is_mask and not TABLE.search(name) and acts(around, name, family)

    return [name for name in tensors.names if name not in around.read and may_act(name)]


def _acts_by_list(around: Surroundings, name: str, family: Family) -> bool:
    """Count every tensor of what is read itself, and of the rest of a layer those that the family does not have.

    Beside all layers stand heads for all kinds of tasks, which no list has: there a name must tell.
    """
    if not around.named.isdisjoint(outer_modules(name)):
        return True
    if LAYER.search(name) is None:
        return TELLING.search(name) is not None and not _is_in(
            known(family)["tensors"], template(name, around.prefixes)
        )
    layer, ignored = _layer_of(name), known(family)["ignored"]
    before, _, number = layer.rpartition(".")
    is_elsewhere = number.isdigit() and before in around.lists and layer not in around.layers  # no attention there
    if is_elsewhere or any(re.search(pattern, name) for pattern in ignored):
        return False
    return not _is_in(known(family)["tensors"], template(name, around.prefixes))


def _acts_by_name(around: Surroundings, name: str, family: Family) -> bool:
    if (inner := around.inside(name)) is None:
        is_near = LAYER.search(name) is None or not around.layers.isdisjoint(outer_modules(name))
        return is_near and TELLING.search(name) is not None
    return not BEHIND.match(inner)


@cache
def _known() -> Json:
    """Read what `dev/known.py` has found in transformers' own code."""
    return parse_json(resources.files("locater.models").joinpath("known.json").read_bytes())


def known(family: Family) -> Json:
    """The modules and config entries of a family of the tables; nothing of one that a layout describes."""
    is_listed = family.model_types or family.signature
    return _known()["families"].get(family.name, {}) if is_listed else {}


def listed_entries(family: Family) -> Collection[str] | None:
    """The config entries of a family's own code that change no logit, or are read; None where they are not known."""
    own = known(family).get("entries")
    return None if own is None else {*own, *_known()["common"]}


def asked_for() -> frozenset[str]:
    """The names of config entries that some row of the tables reads."""
    return frozenset(_known()["asked"])


def _is_in(tree: Json, name: str) -> bool:
    """Tell whether a name, its numbers as N, ends at or beneath a leaf of the tree."""
    for part in name.split("."):
        if part not in tree:
            return False
        if not (tree := tree[part]):
            return True
    return False


def unread_queries(around: Surroundings, names: Collection[str]) -> list[str]:
    """Tensors that by their name make queries, in attention that none of these rows is about."""
    queries = (name for name in names if QUERY.search(name) and name not in around.read)
    return sorted(name for name in queries if around.inside(name) is None)  # what lies inside is a neighbour


def uneven_layers(stack: Stack) -> str | None:
    """A bias that some layers have and others lack, in projections or norms, or a norm of another size: it was lost."""
    found: dict[str, dict[object, list[str]]] = {}
    for module, column in itertools.product(stack, NAMED):
        for pattern in _patterns(module, (column,)):
            for name, weight in ((name, weight) for name in _names(module, pattern) if (weight := module.stored(name))):
                bias = module.stored(name, "bias")
                found.setdefault(f"{column} {pattern}", {}).setdefault(bias is None, []).append(bias or name)
                if column in ("query_norm", "key_norm"):
                    alike = f"{column} shape of {module.shape}"
                    found.setdefault(alike, {}).setdefault(module.tensors.shape(weight), []).append(weight)
    uneven = (list(kinds.values()) for kinds in found.values() if len(kinds) > 1)
    return next((f"`{one[0][:120]}` has no like in `{other[0][:120]}`" for one, other, *_ in uneven), None)


def missing_layers(stack: Stack) -> dict[str, list[int]]:
    """Layers that the stack does not have or the config does not know, by words for what is the matter with them."""
    some, row = stack[0], stack[0].row
    held = {outer for name in some.tensors.names for outer in outer_modules(name)}
    without, absent = [], []
    for layer in sorted(set(range(some.num_layers)) - {module.number for module in stack}):
        module = replace(some, number=layer)
        if row.key != row.query and module.stored(module.key_name):
            expected = f"a tensor `{module.query_name}.weight` next to `{module.key_name}.weight`"
            raise missing(expected, "the file is incomplete")
        (without if _layer_of(module.key_name) in held else absent).append(layer)
    further = some.config.get("num_nextn_predict_layers", 0)  # layers for further tokens, behind the model's own
    first = some.num_layers + (further if isinstance(further, int) else 0)
    numbers = {int(number) for name in some.tensors.names for number in NUMBER.findall(name)}
    candidates = (replace(some, number=number) for number in sorted(numbers) if first <= number < first + 1000)
    beyond = [] if row.names else [module.number for module in candidates if module.stored(module.query_name)]
    return {
        "no queries and keys in {}": without,
        "{} are not in the file": absent,
        "{} of the file are not in the config": beyond,
    }


def misplaced_bias(stack: Stack) -> str | None:
    """In words, the first bias that should be stored and is not, or is and should not be; None where all is well."""
    for module in stack:
        for name, expected in expected_biases(module):
            if expected is None or module.stored(name) is None:
                continue
            bias = module.stored(name, "bias")
            if expected and bias is None:
                return f"`{name[:120]}.bias` is not in the file"
            if bias is not None and not expected:
                return f"`{bias[:120]}` is in the file, where the model has none"
    return None


def lost_norm(stack: Stack) -> str | None:
    """The norm of what cross-attention looks at may be missing together with all that it belongs to, not alone."""
    module = stack[0]
    at = module.row.key_input_norm
    if not isinstance(at, NormAt) or not at.optional:
        return None
    name = module.name(at.name)
    outer = f"{module.prefix}{at.name.partition('.')[0]}."
    alone = module.stored(name) is None and any(other.startswith(outer) for other in module.tensors.names)
    return f"`{name}.weight` is not in the file" if alone else None


def expected_biases(module: AttentionModule) -> Iterator[tuple[str, bool | None]]:
    """Modules of the row, and whether they have a bias; None: as stored."""
    row, config, layer = module.row, module.config, module.number
    shared = row.query == row.key
    yield module.query_name, resolve(row.query_bias, config, layer)
    yield module.key_name, resolve(row.query_bias if shared else row.key_bias, config, layer)
    low_ranks = [low_rank for low_rank in (row.query_low_rank, row.key_low_rank) if low_rank is not None]
    yield from ((module.name(low_rank.up), False) for low_rank in low_ranks)
    inner = (low_rank.norm for low_rank in low_ranks)
    for cell in (*inner, row.input_norm, row.key_input_norm, row.query_norm, row.key_norm):
        at = cell(config, layer) if callable(cell) else cell
        if at is not None and (pattern := at.at(layer)) is not None:
            by_kind = at.kind == "layer" if at.biased is None else resolve(at.biased, config, layer)
            yield from ((name, None if at.bare else by_kind) for name in _names(module, pattern))


def template(name: str, prefixes: Iterable[str]) -> str:
    """A name without the longest of these prefixes, its numbers as N.

    >>> template("model.layers.7.mlp.up_proj.weight", ["", "model."])
    'layers.N.mlp.up_proj.weight'
    """
    before = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default="")
    return ".".join("N" if part.isdigit() else part for part in name[len(before) :].split("."))


def outer_modules(name: str) -> Iterator[str]:
    """The modules that hold a tensor, the innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def _add(around: Surroundings, module: AttentionModule) -> None:
    names = {name for pattern in _patterns(module) for name in _names(module, pattern)}
    for one in names:
        around.read |= {name for kind in ("weight", "bias") if (name := module.stored(one, kind))}
    for one in (module.query_name, module.key_name):
        attention = one.rpartition(".")[0]
        if attention and not attention.rpartition(".")[2].isdigit():
            around.modules.add(attention)
        layer = _layer_of(attention + ".")
        around.layers.add(layer)
        around.lists.add(layer.rpartition(".")[0])
    around.modules |= names
    around.named |= names
    around.prefixes.add(module.prefix)


def _names(module: AttentionModule, pattern: str) -> Iterator[str]:
    for head in range(module.shape.num_heads if "{head}" in pattern else 1):
        yield module.name(pattern, head=head)


def _patterns(module: AttentionModule, columns: tuple[str, ...] = NAMED) -> Iterator[str]:
    """Every pattern of the row, those of its norms and tables included."""
    here = (name for name in columns if name != "sink" or resolve(module.row.sink_only, module.config, module.number))
    pending: list[Any] = [getattr(module.row, name, None) for name in here]
    while pending:
        cell = pending.pop()
        if isinstance(cell, str):
            yield cell
        elif isinstance(cell, NormAt):
            pending += [pattern for pattern in (cell.at(module.number),) if pattern]
        elif is_dataclass(cell):
            pending += [getattr(cell, field.name) for field in fields(cell) if field.name in NESTED]
        elif callable(cell):
            pending.append(ask(cell, module.config, module.number))


def _layer_of(name: str) -> str:
    found = LAYER.search(name)
    return name[: found.end()] if found else name
