"""An attention module of a live model: its name, and how to read its heads as they are at that moment."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from ...errors import Refusal, within
from ...head import Block
from .. import Attention, Config, Layer, Places, Slices, build, slices
from .modules import Found
from .tensors import ModuleTensors

PACKED = "in_proj"  # nn.MultiheadAttention holds its projections as bare parameters


@dataclass(frozen=True)
class Site:
    """One attention module: `build` reads its heads, `slices` says which rows they are; None if they cannot be read."""

    block: Block
    number: int
    num_heads: int
    query_name: str
    key_name: str
    build: Callable[[], Layer]
    slices: Callable[[], Slices] | None = None

    @property
    def owner(self) -> str:
        """The attention module: what the two projections have in common."""
        if self.query_name.endswith(PACKED):
            return self.query_name[: -len(PACKED)].rstrip(".")
        query, key = (name.split(".")[:-1] for name in (self.query_name, self.key_name))
        return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(query, key, strict=False)))


def site_at(places: Places, number: int) -> Site:
    """The site of one layer of a row."""
    names = (places.name(pattern, number) for pattern in (places.row.query, places.row.key))
    num_heads = places.shape(number).num_heads
    read, rows = partial(_read, places, number), partial(_slices, places, number)
    return Site(places.row.block, number, num_heads, *names, build=read, slices=rows)


def site_of(row: Attention, number: int, tensors: ModuleTensors) -> Site:
    """The site of a row that names one module by itself."""
    return site_at(Places(row, Config(), tensors, ""), number)


def refused_site(block: Block, number: int, names: tuple[str, str], reason: str) -> Site:
    """The site of a module whose heads cannot be read, for the reason given."""
    layer = Layer(block, number, (), (f"{block} layer {number}: {reason}",), *names)
    return Site(block, number, 0, *names, build=partial(_unchanged, layer))


def _slices(places: Places, number: int) -> Slices:
    with within(f"{places.row.block} layer {number}"):
        return slices(places, number)


def _read(places: Places, number: int) -> Layer:
    return next(build(places, [number]))


def layer_of(found: Found, number: int, tensors: ModuleTensors) -> Layer:
    """The heads of one attention module whose row is known."""
    if isinstance(found.row, Refusal):
        raise found.row
    return _read(Places(found.row, Config(), tensors, ""), number)


def _unchanged(layer: Layer) -> Layer:
    return layer
