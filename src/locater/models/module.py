"""An attention module, stored or live: its place in the model, its heads, and the rows of parameters that they are."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from ..errors import Refusal, within
from ..head import Block
from .places import Places, Tensors
from .reader import Layer, build
from .schema import Attention, Config
from .slices import Slices, slices

PACKED = "in_proj"  # nn.MultiheadAttention holds its projections as bare parameters


@dataclass(frozen=True)
class AttentionModule:
    """One attention module; `read` gives its heads as they are now, `rows` the parameters they lie in without reading.

    Scanning, prediction, monitor and stabilisers take it and never ask whether it is stored or live.
    """

    block: Block
    number: int  # of its layer
    num_heads: int
    query_name: str
    key_name: str
    build: Callable[[], Layer]
    slices: Callable[[], Slices] | None = None  # None where its heads cannot be read

    @property
    def owner(self) -> str:
        """The name of the attention module: what the two projections have in common."""
        if self.query_name.endswith(PACKED):
            return self.query_name[: -len(PACKED)].rstrip(".")
        query, key = (name.split(".")[:-1] for name in (self.query_name, self.key_name))
        return ".".join(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], zip(query, key, strict=False)))

    def rows(self) -> Slices:
        """List the rows of the parameters that are its heads; refused where these cannot be read."""
        if self.slices is None:
            raise Refusal(self.build().refused[0])
        return self.slices()


def module_at(places: Places, number: int) -> AttentionModule:
    """The attention module of one layer of a row."""
    names = [places.name(pattern, number) for pattern in (places.row.query, places.row.key)]
    with within(f"{places.row.block} layer {number}"):
        num_heads = places.shape(number).num_heads
    read, rows = partial(_read, places, number), partial(_slices, places, number)
    return AttentionModule(places.row.block, number, num_heads, *names, build=read, slices=rows)


def module_of_row(row: Attention, number: int, tensors: Tensors) -> AttentionModule:
    """The attention module of a row that names one module by itself."""
    return module_at(Places(row, Config(), tensors, ""), number)


def refused_module(block: Block, number: int, names: tuple[str, str], reason: str) -> AttentionModule:
    """An attention module whose heads cannot be read, for the reason given."""
    layer = Layer(block, number, (), (f"{block} layer {number}: {reason}",), *names)
    return AttentionModule(block, number, 0, *names, build=partial(_unchanged, layer))


def _slices(places: Places, number: int) -> Slices:
    with within(f"{places.row.block} layer {number}"):
        return slices(places, number)


def _read(places: Places, number: int) -> Layer:
    return next(build(places, [number]))


def _unchanged(layer: Layer) -> Layer:
    return layer
