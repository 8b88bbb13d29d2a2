"""An attention module, stored or live: a row of the tables applied to one layer of one model.

`reader.read_heads` makes its heads, `slices.slices` names the rows of parameters that they are.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from ..budget import budget
from ..errors import missing, refusal, within
from ..head import Block, Head
from .config import Config, ask, optional_whole_number, resolve, whole_number
from .schema import Attention
from .tensors import Held, Tensors

PACKED = "in_proj"  # nn.MultiheadAttention holds its projections as bare parameters
REMEDY = "correct config.json"


class HeadShape(NamedTuple):
    """The sizes that every layout depends on."""

    num_heads: int
    num_key_heads: int
    d_head: int

    @property
    def ratio(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_key_heads


@dataclass(frozen=True, eq=False)
class AttentionModule:
    """One attention module, of which nothing is read yet; scanning, prediction, monitor and stabilisers take it.

    `read_heads` gives the same module with its heads as they are now. A head that could not be made is a sentence in
    `refused`; the others are still there.
    """

    row: Attention
    config: Config
    tensors: Tensors
    number: int = 0  # of its layer
    prefix: str = ""  # before all names of the row
    reason: str | None = None  # why its heads cannot be read
    heads: tuple[Head, ...] = ()  # empty until they are read
    refused: tuple[str, ...] = ()
    caller: str | None = None  # the innermost module that ran when its kernel was called, if that was seen
    otherwise: str | None = None  # in words, how that call was masked, where heads cannot say it

    @property
    def block(self) -> Block:
        return self.row.block

    @property
    def place(self) -> str:
        return f"{self.block} layer {self.number}"

    @cached_property
    def query_name(self) -> str:
        """The module whose output the queries are part of."""
        return self.name(self.row.query)

    @cached_property
    def key_name(self) -> str:
        return self.name(self.row.key)

    @property
    def owner(self) -> str:
        """The name of the attention module: what the two projections have in common."""
        if self.query_name.endswith(PACKED):
            return self.query_name[: -len(PACKED)].rstrip(".")
        query, key = (name.split(".")[:-1] for name in (self.query_name, self.key_name))
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(query, key, strict=False))
        return ".".join(part for part, _ in pairs)

    # ------------------------------------------------------------------------------------------------------- sizes
    @cached_property
    def num_layers(self) -> int:
        """Layers of the model, with attention of this kind or without."""
        if resolve(self.row.layers, self.config) is None:
            return next(n for n in itertools.count() if not self.stored(replace(self, number=n).query_name))
        return budget().check("layers", whole_number(self.row.layers, self.config, "number of layers"), remedy=REMEDY)

    @cached_property
    def num_heads(self) -> int:
        """Heads, as known without reading one; where none can be read, as its row says."""
        if self.reason is not None:
            return int(resolve(self.row.heads, self.config))
        with within(self.place):
            return self.shape.num_heads

    @cached_property
    def shape(self) -> HeadShape:
        """Heads, key heads and their size; Gemma 4's global layers have heads of another size."""
        row, layer = self.row, self.number
        num_heads = num_key_heads = whole_number(row.heads, self.config, "number of heads", layer=layer)
        budget().check("heads", num_heads, holds=self._longest(), remedy=REMEDY)
        if row.key_heads is not None:
            num_key_heads = whole_number(row.key_heads, self.config, "number of key heads", layer=layer)
        if num_heads % num_key_heads:
            raise refusal("a number of heads that is a multiple of the key heads", f"{num_heads} and {num_key_heads}")
        d_head = optional_whole_number(row.d_head, self.config, "size of a head", layer=layer)
        if not d_head:
            d_head, rest = divmod(self.width, num_heads)
            if rest:
                raise refusal("a model width that is a multiple of the number of heads", f"{num_heads} heads")
        return HeadShape(num_heads, num_key_heads, d_head)

    def _longest(self) -> int:
        """The largest size of the queries: every head has a row of its own in them."""
        low_rank = self.row.query_low_rank
        names = (self.query_name,) if low_rank is None else (self.query_name, self.name(low_rank.up))
        stored = [name for one in names if (name := self.stored(one))]
        return max((size for name in stored for size in self.tensors.shape(name)), default=1)

    @property
    def knows_width(self) -> bool:
        """Tell whether anything but the stored tensors says d_model; a layout file need not."""
        cell = self.row.d_model
        return cell is not None and not (isinstance(cell, str) and self.config.get(cell) is None)

    @property
    def width(self) -> int:
        """d_model, from the config or, where a family's configs do not say it, from the stored queries."""
        if self.row.d_model is not None:
            return whole_number(self.row.d_model, self.config, "model width")
        return self.tensors.shape(self.required(self.query_name))[0 if self.row.transposed else -1]

    # ------------------------------------------------------------------------------------------- names and tensors
    def name(self, pattern: str, *, head: int = 0) -> str:
        """The first of the pattern's alternatives that is stored, or else the first."""
        further = ask(self.row.names, self.config, self.number) if self.row.names else {}
        values = {"layer": self.number, "previous": self.number - 1, "head": head, **further}
        # Stored alternatives first: else a file that has the model with its head, or without, would seem to be empty.
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

    def _numbers(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        """A tensor that holds numbers as they are: codes of a quantiser say nothing without its scales."""
        tensor = self.tensors.read(name, rows)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            remedy = "convert the checkpoint to 16 bits with the tool that quantised it"
            raise refusal(f"floating-point numbers of at least 16 bits in `{name}`", tensor.dtype, remedy)
        return tensor


Stack = tuple[AttentionModule, ...]  # the modules of one row, layer by layer


def find_stack(row: Attention, config: Config, tensors: Tensors) -> Stack:
    """The attention modules of a row that are stored; none where the model has no layer of this kind."""
    config = config.within(row.config)
    if not resolve(row.only, config):
        return ()
    prefixes = row.prefixes if row.prefixes is not None else _all_prefixes(row.query, tensors)
    firsts = [AttentionModule(row, config, tensors, prefix=prefix) for prefix in prefixes]
    every = [[replace(first, number=layer) for layer in range(first.num_layers)] for first in firsts]
    stored = (tuple(one for one in stack if one.stored(one.query_name)) for stack in every)
    stacks = [stack for stack in stored if stack]
    if len(stacks) > 1:
        names = ", ".join(stack[0].query_name for stack in stacks)
        raise refusal(f"one place for {row.block} queries", names, "describe the one you mean with --layout")
    return stacks[0] if stacks else ()


def _all_prefixes(pattern: str, tensors: Tensors) -> list[str]:
    """List every prefix of the first layer's queries."""
    ends = [pattern.format(layer=0) + kind for kind in (".weight", "_weight")]
    whole = (name.removesuffix(end) for name in tensors.names for end in ends if name.endswith(end))
    return sorted({prefix for prefix in whole if not prefix or prefix.endswith(".")})


def module_of_row(row: Attention, tensors: Tensors) -> AttentionModule:
    """The attention module of a row that names one module by itself."""
    return AttentionModule(row, Config(), tensors)


def refused_module(
    block: Block, names: tuple[str, str], reason: str, *, number: int = 0, num_heads: int = 0
) -> AttentionModule:
    """An attention module whose heads cannot be read, for the reason given."""
    query, key = (name.replace("{", "{{").replace("}", "}}") for name in names)
    row = Attention(block, query, key, heads=num_heads)
    return AttentionModule(row, Config(), Held({}), number, reason=reason)
