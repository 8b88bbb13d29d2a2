"""The columns of the family tables: where a model keeps its queries and keys, and what it does with them.

Patterns are module names with `{layer}` (and `{previous}`); weight and bias are found beneath them. Alternatives are
separated by "|": the first that is stored counts. Cells are those of `config.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

from ..errors import refusal
from ..head import Block
from ..positions import Rotary
from .config import Cell, Config, entry, resolve, whole_number

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
    single: bool = False  # its gain is one number, or one for each head

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
    initial: tuple[str, ...] = ()  # entries of the config that speak of initial weights alone


class _Biases(TypedDict):
    """Two columns of `Attention`."""

    query_bias: Cell
    key_bias: Cell


def both_biased(cell: Cell) -> _Biases:
    """The columns of projections that have biases together, or neither."""
    return {"query_bias": cell, "key_bias": cell}


class _Norms(TypedDict):
    """Two columns of `Attention`."""

    query_norm: NormCell
    key_norm: NormCell


def both_normed(norm: NormAt, *, switch: str | None = None) -> _Norms:
    """The columns of QK-norm: `*` in its name is q or k. `switch` names an entry that must be true."""
    query, key = (replace(norm, name=norm.name.replace("*", side)) for side in "qk")
    if switch is None:
        return {"query_norm": query, "key_norm": key}

    def chosen(side: NormAt) -> NormCell:
        return lambda config, layer: side if config.get(switch, False) else None

    return {"query_norm": chosen(query), "key_norm": chosen(key)}


def ahead(config: Config, layer: int) -> int | None:
    """Decoders are causal unless the config says otherwise, as encoders made of them do."""
    return 0 if config.values.get("is_causal", True) else None


def provided(cell: Cell, **settings: bool) -> Callable[[Config, int], Any]:
    """The cell where the config says these settings or leaves them out; no row has other values, which are refused."""

    def checked(config: Config, layer: int) -> Any:
        for name, value in settings.items():
            if bool(config.values.get(name, value)) is not value:
                got = f"`{name}` {str(not value).lower()} in the config"
                raise refusal(f"a model with `{name}` {str(value).lower()}", got, "describe the model with --layout")
        return resolve(cell, config, layer)

    return checked


causal = provided(0, is_causal=True)  # rows of decoders: some of their code obeys `is_causal`, some does not


def renamed(row: Attention, old: str, new: str, **columns: Any) -> Attention:
    """The row with a word replaced in its block, names and entries of the config, and with these columns."""

    def swap(cell: Any) -> Any:
        if isinstance(cell, NormAt):
            return replace(cell, name=swap(cell.name), first=swap(cell.first))
        return cell.replace(old, new) if isinstance(cell, str) else cell

    named = ("block", "query", "key", "layers", "heads", "d_model", "input_norm")
    return replace(row, **{column: swap(getattr(row, column)) for column in named} | columns)


def terms_left_out(terms: dict[str, Any]) -> str | None:
    """Name what a config asks for and no row says; None where it asks for none of it."""
    present = [term for term, is_set in terms.items() if is_set]
    return f"{', '.join(present)} left out" if present else None


# -------------------------------------------------------------------------- layers with a sliding window, and its reach
Rule = Callable[[Config, int], bool]  # whether a layer slides


def every_layer(config: Config, layer: int) -> bool:
    return True


def layer_types_or(rule: Rule) -> Rule:
    """`layer_types` where the config has it, the older rule where not."""

    def slides(config: Config, layer: int) -> bool:
        types = config.get("layer_types")
        return rule(config, layer) if types is None else types[layer] == "sliding_attention"

    return slides


def all_but_every(period: int, *, stated: str | None = "sliding_window_pattern") -> Rule:
    """Every `period`-th layer sees all, the others slide; the entry `stated` may hold another period."""

    def slides(config: Config, layer: int) -> bool:
        return (layer + 1) % (config.get(stated, period) if stated else period) != 0

    return layer_types_or(slides)


def window(slides: Rule, *, default: int | None = None, switch: str | None = None) -> Callable[[Config, int], Any]:
    """A window of w admits distances up to w − 1.

    A null `sliding_window` means none, unlike a missing one; `switch` names an entry that must be true besides.
    """

    def lookback(config: Config, layer: int) -> int | None:
        size = config.values.get("sliding_window", default)
        if size is None or (switch is not None and not config.get(switch, False)) or not slides(config, layer):
            return None
        if ahead(config, layer) is None:
            raise refusal("a causal model", "a window that looks both ways", "describe the model with --layout")
        return whole_number(size if isinstance(size, int) else lambda *_: size, config, "`sliding_window`") - 1

    return lookback
