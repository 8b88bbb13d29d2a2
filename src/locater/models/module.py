"""An attention module, stored or live: its place in the model, its heads, and the rows of parameters that they are."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import takewhile

from ..errors import Refusal, within
from ..head import Block
from .places import Places, Tensors
from .reader import Layer, LayerReader
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
    query_name: str
    key_name: str
    build: Callable[[], Layer]
    count: Callable[[], int]  # of heads
    slices: Callable[[], Slices] | None = None  # None where its heads cannot be read

    @cached_property
    def num_heads(self) -> int:
        return self.count()

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


def modules_of(places: Places, numbers: Iterable[int]) -> Iterator[AttentionModule]:
    """The attention modules of some layers of a row, to be read in turn: what neighbours share is read once."""
    reader = LayerReader(places)
    return (module_at(places, number, reader.read) for number in numbers)


def module_at(places: Places, number: int, read: Callable[[int, str], Layer]) -> AttentionModule:
    """The attention module of one layer of a row; `read` takes the layer and the name of its queries."""
    names = [places.name(pattern, number) for pattern in (places.row.query, places.row.key)]
    build, count, rows = (
        partial(read, number, names[0]),
        partial(_count, places, number),
        partial(_slices, places, number),
    )
    return AttentionModule(places.row.block, number, *names, build=build, count=count, slices=rows)


def module_of_row(row: Attention, number: int, tensors: Tensors) -> AttentionModule:
    """The attention module of a row that names one module by itself."""
    places = Places(row, Config(), tensors, "")
    return module_at(places, number, partial(_read, places))


def refused_module(block: Block, number: int, names: tuple[str, str], reason: str) -> AttentionModule:
    """An attention module whose heads cannot be read, for the reason given."""
    layer = Layer(block, number, (), (f"{block} layer {number}: {reason}",), *names)
    return AttentionModule(block, number, *names, build=partial(_unchanged, layer), count=int)


def _slices(places: Places, number: int) -> Slices:
    with within(f"{places.row.block} layer {number}"):
        return slices(places, number)


def _count(places: Places, number: int) -> int:
    with within(f"{places.row.block} layer {number}"):
        return places.shape(number).num_heads


def _read(places: Places, number: int, name: str) -> Layer:
    return LayerReader(places).read(number, name)


def _unchanged(layer: Layer) -> Layer:
    return layer
