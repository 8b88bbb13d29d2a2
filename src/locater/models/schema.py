"""The columns of the family tables: where a model keeps its queries and keys, and what it does with them.

Patterns are module names with `{layer}` (and `{previous}`); weight and bias are found beneath them. Alternatives are
parted by "|": the first that is stored counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..head import Block
from .config import Cell, Config
from .fused import Layout

Names = Callable[[Config, int], dict[str, int]]


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

    def at(self, layer: int) -> str | None:
        """The pattern for this layer; None where the layer's input has no norm."""
        return self.first if layer == 0 and self.first != "" else self.name


# A norm, or a function that chooses it by config and layer.
NormCell = NormAt | Callable[[Config, int], NormAt | None] | None


@dataclass(frozen=True)
class RotaryAt:
    """Which rows turn, and where the config says how fast."""

    base: Cell = lambda config, layer: config.get("rope_theta|rotary_emb_base", 10_000.0)
    fraction: Cell = lambda config, layer: config.get("partial_rotary_factor|rotary_pct", 1.0)
    num_dims: Cell = None  # instead of a fraction of d_head
    start: Cell = 0
    interleaved: Cell = False
    only: Cell = True  # whether this layer turns at all
    parameters: Cell = None  # the layer's own `rope_parameters`, where layers differ


@dataclass(frozen=True)
class BucketsAt:
    """Where the learned bias per bucket of distance lies (T5, MPNet)."""

    name: str
    bidirectional: bool
    max_distance: Cell = 128


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
    fused: Layout | None = None  # how q, k, v share one tensor
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
    rotary: RotaryAt | None = None
    buckets: BucketsAt | None = None
    alibi: Callable[[Config, int], float | None] | None = None  # the slope of a head
    scale: Cell = None  # None: 1/√d_head
    softcap: Cell = None
    lookback: Cell = None
    lookahead: Cell = None  # 0: causal


@dataclass(frozen=True)
class Family:
    """Model types that share a table row. `partial` says in words what the heads leave out, if anything."""

    name: str
    model_types: tuple[str, ...]
    attention: tuple[Attention, ...]
    partial: Callable[[Config], str | None] | None = None
    signature: str | None = None  # how a layer-0 tensor's name ends by which files without a model type are known
    foreign: tuple[str, ...] = ()  # parts of names that mean another kind of attention under the same signature
