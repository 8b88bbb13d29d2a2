"""Finding a row's tensors in one model: prefix, names, shapes; reading them as (out, in), each once per layer."""

import itertools
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, Protocol

from torch import Tensor

from ..budget import budget
from ..errors import missing, refusal
from .schema import Attention, Config, ask, count, optional_count, resolve


class Shape(NamedTuple):
    """The sizes that every layout depends on."""

    num_heads: int
    num_key_heads: int
    d_head: int

    @property
    def ratio(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_key_heads


REMEDY = "correct config.json"


class Tensors(Protocol):
    """Named tensors, read when asked for: a checkpoint or a live module."""

    @property
    def names(self) -> Collection[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Places:
    """One row applied to one model: where its layers are and how to read them."""

    row: Attention
    config: Config
    tensors: Tensors
    prefix: str

    @classmethod
    def find(cls, row: Attention, config: Config, tensors: Tensors) -> "Places | None":
        """None where no layer of this kind is stored."""
        config = config.within(row.config)
        if not resolve(row.only, config):
            return None
        prefixes = row.prefixes if row.prefixes is not None else _all_prefixes(row.query, tensors)
        candidates = [cls(row, config, tensors, prefix) for prefix in prefixes]
        candidates = [places for places in candidates if places.layers]
        if len(candidates) > 1:
            names = ", ".join(places.name(row.query, places.layers[0]) for places in candidates)
            raise refusal(f"one place for {row.block} queries", names, "describe the one you mean with --layout")
        return candidates[0] if candidates else None

    @cached_property
    def num_layers(self) -> int:
        if resolve(self.row.layers, self.config) is None:
            return next(layer for layer in itertools.count() if not self.stored(self.name(self.row.query, layer)))
        return budget().check("layers", count(self.row.layers, self.config, "number of layers"), remedy=REMEDY)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers that have attention of this kind."""
        stored = (self.stored(self.name(self.row.query, layer)) for layer in range(self.num_layers))
        return tuple(layer for layer, name in enumerate(stored) if name)

    @cached_property
    def _shapes(self) -> dict[int, Shape]:
        return {}

    def shape(self, layer: int) -> Shape:
        """Heads, key heads and their size in one layer; Gemma 4's global layers have heads of another size."""
        if layer not in self._shapes:
            self._shapes[layer] = self._shape(layer)
        return self._shapes[layer]

    def _shape(self, layer: int) -> Shape:
        num_heads = num_key_heads = count(self.row.heads, self.config, "number of heads", layer=layer)
        budget().check("heads", num_heads, holds=self._longest(layer), remedy=REMEDY)
        if self.row.key_heads is not None:
            num_key_heads = count(self.row.key_heads, self.config, "number of key heads", layer=layer)
        if num_heads % num_key_heads:
            raise refusal("a number of heads that is a multiple of the key heads", f"{num_heads} and {num_key_heads}")
        d_head = optional_count(self.row.d_head, self.config, "size of a head", layer=layer)
        if not d_head:
            d_head, rest = divmod(self.width, num_heads)
            if rest:
                raise refusal("a model width that is a multiple of the number of heads", f"{num_heads} heads")
        return Shape(num_heads, num_key_heads, d_head)

    def _longest(self, layer: int) -> int:
        """The largest size of a layer's queries: every head has a row of its own in them."""
        low_rank = self.row.query_low_rank
        patterns = (self.row.query,) if low_rank is None else (self.row.query, low_rank.up)
        names = (self.stored(self.name(pattern, layer)) for pattern in patterns)
        return max((size for name in names if name for size in self.tensors.shape(name)), default=1)

    @property
    def knows_width(self) -> bool:
        """Tell whether anything but the stored tensors says d_model; a layout file need not."""
        cell = self.row.d_model
        return cell is not None and not (isinstance(cell, str) and self.config.get(cell) is None)

    @property
    def width(self) -> int:
        """d_model, from the config or, where a family's configs do not say it, from the stored queries."""
        if self.row.d_model is not None:
            return count(self.row.d_model, self.config, "model width")
        name = self.stored(self.name(self.row.query, self.layers[0]))
        assert name is not None
        return self.tensors.shape(name)[0 if self.row.transposed else -1]

    def name(self, pattern: str, layer: int, *, head: int = 0) -> str:
        """The first of the pattern's alternatives that is stored, or else the first."""
        further = ask(self.row.names, self.config, layer) if self.row.names else {}
        values = {"layer": layer, "previous": layer - 1, "head": head, **further}
        names = [self.prefix + alternative.format_map(values) for alternative in pattern.split("|")]
        for name in names[:-1]:
            if self.stored(name):
                return name
        return names[0] if len(names) > 1 and not self.stored(names[-1]) else names[-1]

    def stored(self, module: str, kind: str = "weight") -> str | None:
        """The tensor beneath a module; nn.MultiheadAttention joins with an underscore, some files store it bare.

        The first BERT files call a norm's gain and bias `gamma` and `beta`.
        """
        further = (f"{module}.gamma", module) if kind == "weight" else (f"{module}.beta",)
        stored = self.tensors.names
        for name in (f"{module}.{kind}", f"{module}_{kind}", *further):
            if name in stored:
                return name
        return None

    def required(self, module: str) -> str:
        """The name of the weight beneath a module; refused where there is none."""
        if (name := self.stored(module)) is None:
            raise missing(f"a tensor `{module}.weight`", "the file is incomplete or of another family")
        return name

    def weight(self, module: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A weight as (out, in), in the type it is stored in."""
        name = self.required(module)
        if self.row.transposed and len(self.tensors.shape(name)) == 2:
            weight = self._numbers(name, None).T
            return weight if rows is None else weight[rows[0] : rows[1]]
        return self._numbers(name, rows)

    def _numbers(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        """A tensor that holds numbers as they are: codes of a quantiser say nothing without its scales."""
        tensor = self.tensors.read(name, rows)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            remedy = "convert the checkpoint to 16 bits with the tool that quantised it"
            raise refusal(f"floating-point numbers of at least 16 bits in `{name}`", tensor.dtype, remedy)
        return tensor

    def bias(self, module: str, rows: tuple[int, int] | None = None) -> Tensor | None:
        """A bias, with as many numbers as its weight has outputs; None where none is stored."""
        name, weight = self.stored(module, "bias"), self.stored(module)
        if name is None:
            return None
        if weight is not None:
            shape = self.tensors.shape(weight)
            expected = (shape[-1 if self.row.transposed else 0],) if len(shape) == 2 else shape
            if math.prod(self.tensors.shape(name)) != math.prod(expected):
                raise refusal(f"{math.prod(expected)} numbers in `{name}`", f"shape {[*self.tensors.shape(name)]}")
        return self._numbers(name, rows)

    def finite(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor itself; a NaN in a bias, a norm or a table would pass as a number further on."""
        if not bool(tensor.isfinite().all()):
            raise refusal(f"finite numbers in `{name}`", "NaN or infinity", "the checkpoint is damaged or diverged")
        return tensor


def _all_prefixes(pattern: str, tensors: Tensors) -> list[str]:
    """List every prefix of the first layer's queries."""
    ends = [pattern.format(layer=0) + kind for kind in (".weight", "_weight")]
    whole = (name.removesuffix(end) for name in tensors.names for end in ends if name.endswith(end))
    return sorted({prefix for prefix in whole if not prefix or prefix.endswith(".")})


class Once:
    """Holds what was read for as long as it lives itself: one layer."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors, self.names = tensors, tensors.names
        self.held: dict[tuple[str, tuple[int, int] | None], Tensor] = {}
        self.shape = cache(tensors.shape)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        if (name, rows) not in self.held:
            self.held[name, rows] = self.tensors.read(name, rows)
        return self.held[name, rows]


STACK = re.compile(r"^(?P<before>(?:.*\.)?decoder\.layers)\.(?P<inside>[a-z]\w*\..+)$")


class Unstacked:
    """`layers.self_attention.x` of shape (L, …) goes by `layers.0.self_attention.x`, … ; a read takes one layer."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    @cached_property
    def places(self) -> dict[str, tuple[str, int | None]]:
        """From a name to the stored tensor and the layer in it."""
        found: dict[str, tuple[str, int | None]] = {}
        limits, letters = budget(), 0
        for name in self.tensors.names:
            stack, shape = STACK.match(name), self.tensors.shape(name)
            if stack is None or not shape:
                found[name] = name, None
                continue
            limits.check("tensors", len(found) + limits.check("layers", shape[0]))
            letters = limits.check("names", letters + shape[0] * len(name))
            for layer in range(shape[0]):
                found[f"{stack['before']}.{layer}.{stack['inside']}"] = name, layer
        return found

    @property
    def names(self) -> Collection[str]:
        return self.places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored, layer = self.places[name]
        return self.tensors.shape(stored)[0 if layer is None else 1 :]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        stored, layer = self.places[name]
        if layer is None:
            return self.tensors.read(stored, rows)
        tensor = self.tensors.read(stored, (layer, layer + 1))[0]
        return tensor if rows is None else tensor[rows[0] : rows[1]]


def unstacked(tensors: Tensors) -> Tensors:
    """The tensors themselves where none is a stack of layers with fused queries and keys."""
    is_stack = any(name.endswith("layers.self_attention.linear_qkv.weight") for name in tensors.names)
    return Unstacked(tensors) if is_stack else tensors
