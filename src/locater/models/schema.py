"""The columns of the family tables: where a model keeps its queries and keys, and what it does with them.

Patterns are module names with `{layer}` (and `{previous}`); weight and bias are found beneath them. Alternatives are
separated by "|": the first that is stored counts. A cell is a literal, the name of a config entry, or a function.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from ..errors import Refusal, missing, refusal
from ..head import Block
from ..positions import Rotary
from ..records import JsonMapping


@dataclass(frozen=True)
class Config:
    """`config["a|b.c"]` is the first of `a` and `b → c` that is there and not null."""

    values: JsonMapping = field(default_factory=dict)

    def get(self, keys: str, default: object = None) -> Any:
        for key in keys.split("|"):
            value: Any = self.values
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return default

    def __getitem__(self, keys: str) -> Any:
        if (value := self.get(keys)) is None:
            wanted = " or ".join(f"`{key}`" for key in keys.split("|"))
            if not self.values:
                remedy = "put the model's config.json beside its weights, or describe the model with --layout"
                raise missing(f"a config.json with {wanted}", remedy)
            remedy = "add it to config.json, or describe the model with --layout"
            raise missing(f"{wanted} in the config", remedy)
        return value

    def anywhere(self, keys: str) -> Any:
        """The one value that the first of these keys has, at the top or in any table of the config; None where none.

        Refused where tables disagree: a config of a whole run may describe several models.
        """
        for key in keys.split("|"):
            values = list(dict.fromkeys(value for value in _nested(self.values, key) if is_number(value)))
            if len(values) > 1:
                listed = ", ".join(map(str, values[:4]))
                raise refusal(f"one value of `{key}` in the config", listed, "keep one of them")
            if values:
                return values[0]
        return None

    def positive(self, keys: str, default: float | None = None) -> float:
        """An entry that must be a positive number; files write whole ones without a point."""
        value = self[keys] if default is None else self.get(keys, default)
        if not is_number(value) or not value > 0:
            got = reprlib.repr(value)
            raise refusal(f"a positive number for `{keys}` in the config", got, "correct config.json")
        return float(value)

    def numbers(self, keys: str, length: int) -> tuple[float, ...]:
        """Read an entry that must be a list of this many positive numbers."""
        values = self[keys]
        fits = isinstance(values, list | tuple) and len(values) == length
        if not fits or not all(is_number(value) and value > 0 for value in values):
            got = f"{len(values)}: {reprlib.repr(values)}" if isinstance(values, list | tuple) else reprlib.repr(values)
            raise refusal(f"{length} positive numbers for `{keys}` in the config", got, "correct config.json")
        return tuple(map(float, values))

    def within(self, key: str | None) -> "Config":
        """The part of a composite config, such as `text_config`."""
        if key is None:
            return self
        if not isinstance(part := self[key], Mapping):
            raise refusal(f"a table for `{key}` in the config", reprlib.repr(part), "correct config.json")
        return Config(part)


def _nested(values: JsonMapping, key: str) -> Iterator[Any]:
    """Yield the values under a key in tables, and in tables within them."""
    pending: list[JsonMapping] = [values]
    while pending:
        table = pending.pop()
        if key in table:
            yield table[key]
        pending += [value for value in table.values() if isinstance(value, Mapping)]


# A cell of a table: a literal, the name of a config entry, or a function of the config and the layer.
Cell = int | float | bool | str | None | Callable[[Config, int], Any]


def ask(function: Callable[..., Any], config: Config, *place: int) -> Any:
    """Call a table's function on a config: untrusted values can fail it in any way."""
    try:
        return function(config, *place)
    except Refusal:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as cause:
        got = f"one that ends in {reprlib.repr(cause)}"
        raise refusal("a config that describes this model", got, "correct config.json") from cause


def resolve(cell: Cell, config: Config, layer: int = 0) -> Any:
    """The value of a cell for one layer."""
    if callable(cell):
        return ask(cell, config, layer)
    return config[cell] if isinstance(cell, str) else cell


def count(cell: Cell, config: Config, what: str, *, layer: int = 0, least: int = 1) -> int:
    """The value of a cell that must be a whole number, by default a positive one."""
    value = resolve(cell, config, layer)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        kind = "positive whole number" if least == 1 else f"whole number of at least {least}"
        raise refusal(f"a {kind} for the {what}", reprlib.repr(value), "correct config.json or use --layout")
    return value


def number(cell: Cell, config: Config, what: str, *, layer: int = 0) -> float:
    """The value of a cell that must be a finite number."""
    value = resolve(cell, config, layer)
    if not is_number(value):
        raise refusal(f"a number for the {what}", reprlib.repr(value), "correct config.json or use --layout")
    return float(value)


def optional_count(cell: Cell, config: Config, what: str, *, layer: int = 0) -> int | None:
    """A whole number from 0 on, or nothing."""
    return None if resolve(cell, config, layer) is None else count(cell, config, what, layer=layer, least=0)


def optional_number(cell: Cell, config: Config, what: str, *, layer: int = 0) -> float | None:
    return None if resolve(cell, config, layer) is None else number(cell, config, what, layer=layer)


def is_number(value: object) -> bool:
    """Finite as a float, too: JSON holds whole numbers of any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def entry(keys: str, default: object) -> Callable[[Config, int], Any]:
    """A cell: the config's entry, or what the family's own config class takes where it is silent."""
    return lambda config, layer: config.get(keys, default)


def anywhere(keys: str) -> Callable[[Config, int], Any]:
    """A cell: the config's entry, wherever in it that stands; asked for where there is none."""
    return lambda config, layer: found if (found := config.anywhere(keys)) is not None else config[keys]


Names = Callable[[Config, int], dict[str, int]]
Layout = Literal["qkv", "grouped", "codegen"]  # how q, k, v share one tensor: see slices.first_rows


@dataclass(frozen=True)
class Starts:
    """The first row of every query head and of every key head, for projections that follow no layout by name."""

    query: tuple[int, ...]
    key: tuple[int, ...]


@dataclass(frozen=True)
class NormAt:
    """A norm's kind and place; the pattern may name a `{head}` too.

    `first` is its name for layer 0 where that differs (post-LN: the embedding's norm; None: no norm there).
    """

    kind: Literal["layer", "rms", "l2"]
    name: str
    first: str | None = ""
    epsilon: Cell = 1e-5
    plus_one: bool = False  # Gemma stores gain − 1
    times: Cell = 1.0  # what the norm's output is multiplied by before attention takes it
    optional: bool = False  # a file may leave it out: then there is none
    bare: Literal["layer", "rms"] | None = None  # its kind where no bias is stored, if that tells
    plain: bool = False  # neither gain nor bias is stored
    biased: Cell = None  # whether it has a bias; None: a LayerNorm has one, an RMSNorm none

    def at(self, layer: int) -> str | None:
        """The pattern for this layer; None where the layer's input has no norm."""
        return self.first if layer == 0 and self.first != "" else self.name


# A norm, or a function that chooses it by config and layer.
NormCell = NormAt | Callable[[Config, int], NormAt | None] | None


@dataclass(frozen=True)
class RotaryAt:
    """Rotated rows, and the place of their speed in the config."""

    base: Cell = entry("rope_theta", 10_000.0)
    fraction: Cell = None  # of a head; None: all of it, in families whose code asks for no fraction
    num_dims: Cell = None  # instead of a fraction of d_head
    start: Cell = 0
    interleaved: Cell = False
    backward: bool = False  # turned by minus the angle
    only: Cell = True  # whether this layer turns at all
    parameters: Cell = None  # the layer's own `rope_parameters`, where layers differ


@dataclass(frozen=True)
class BucketsAt:
    """Location of the learned bias per bucket of distance (T5, MPNet)."""

    name: str
    bidirectional: bool
    max_distance: Cell = 128
    num_buckets: Cell = entry("relative_attention_num_buckets", 32)


@dataclass(frozen=True)
class LowRankAt:
    """down → norm → up (multi-head latent attention). `rows` of each head's `per_head` rows of `up` are used."""

    down: str
    up: str
    norm: NormAt | None
    rank: Cell
    rows: Cell
    per_head: Cell


@dataclass(frozen=True)
class Attention:
    """One kind of attention in a family: a row of the table."""

    block: Block
    query: str
    key: str
    only: Cell = True  # whether the config speaks of such a block at all
    layers: Cell = "num_hidden_layers"  # None: as many as are stored
    heads: Cell = "num_attention_heads"
    key_heads: Cell = None  # None: as many as query heads
    d_model: Cell = "hidden_size"  # None: the width of the stored queries
    d_head: Cell = None  # None: d_model / heads, as the models of this family define it
    fused: Layout | Starts | None = None  # how q, k, v share one tensor
    values_behind: bool = False  # the key tensor holds as many rows of values after the keys
    gated: bool = False  # each query head's rows are followed by as many of its output gate
    transposed: bool = False  # weights stored (in, out)
    prefixes: tuple[str, ...] | None = ("", "model.", "transformer.")  # None: any, if there is only one
    config: str | None = None  # the part of a composite config that describes this block
    names: Names | None = None  # further placeholders of the patterns
    input_norm: NormCell = None
    key_input_norm: NormCell = None  # None: the input norm, unless `block` is cross
    query_norm: NormCell = None
    key_norm: NormCell = None
    norm_over: Literal["head", "projection"] = "head"  # what QK-norm's statistics run over
    query_low_rank: LowRankAt | None = None
    key_low_rank: LowRankAt | None = None
    rotary: RotaryAt | Rotary | None = None  # a place in the config, or the positions themselves
    turns_first: bool = False  # QK-norm stands behind the rotation
    buckets: BucketsAt | None = None
    alibi: Callable[[Config, int], float | None] | None = None  # the slope of a head
    scale: Cell = None  # None: 1/√d_head
    softcap: Cell = None
    lookback: Cell = None
    lookahead: Cell = None  # 0: causal
    sink: str | None = None  # a logit per head of a key that is no token
    sink_only: Cell = True  # whether this layer has one
    query_bias: Cell = None  # whether the projection has a bias; None: as stored
    key_bias: Cell = None  # where keys have a tensor of their own


@dataclass(frozen=True)
class Family:
    """Model types that share a table row. `partial` says in words what the heads leave out, if anything."""

    name: str
    model_types: tuple[str, ...]
    attention: tuple[Attention, ...]
    partial: Callable[[Config], str | None] | None = None
    signature: str | None = None  # how a layer-0 tensor's name ends by which files without a model type are known
    inside: str = ""  # what all names in a block of such a file match, from behind its number
    needs: tuple[str, ...] | Callable[[Config], tuple[str, ...]] = ()  # how names end that it has; `.x`: in every block


class Biases(TypedDict):
    """Two columns of `Attention`."""

    query_bias: Cell
    key_bias: Cell


def both_biased(cell: Cell) -> Biases:
    """The columns of projections that have biases together, or neither."""
    return {"query_bias": cell, "key_bias": cell}


def ahead(config: Config, layer: int) -> int | None:
    """Decoders are causal unless the config says otherwise, as encoders made of them do."""
    return 0 if config.values.get("is_causal", True) else None


def causal(config: Config, layer: int) -> int:
    """Decoders whose rows are causal: some of their code obeys `is_causal`, some does not."""
    if ahead(config, layer) is None:
        raise refusal("a causal model", "`is_causal` false in the config", "describe the model with --layout")
    return 0
