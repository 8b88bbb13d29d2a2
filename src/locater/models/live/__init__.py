"""Live models: the heads of an `nn.Module` as views of its parameters, so that gradients flow through them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from ...errors import Refusal, refusal, within
from ...head import Block
from .. import Config, Family, Layer, Places, Slices, build, open_model, slices
from ..registry import is_in_tables
from .discover import discover
from .explicit import Explicit, describe, explicit_row
from .modules import Found, search
from .tensors import ModuleTensors, named_modules, settings
from .watch import Sample

__all__ = ["ModuleTensors", "Sample", "Site", "layers", "settings", "sites"]


def layers(
    model: nn.Module,
    *,
    family: Family | None = None,
    heads: Sequence[Explicit] = (),
    sample: Sample | None = None,
    tensors: ModuleTensors | None = None,
) -> Iterator[Layer]:
    """The heads of every attention module, as views: what they say changes with the parameters.

    A model whose config names a known family is read by that family's table. Any other is run once on `sample`, a batch
    as it takes them, and its heads are found by what its attention kernels are given. Without a sample it is searched
    for torch's and timm's attention modules, whose causality cannot be seen from outside: only
    `nn.TransformerDecoderLayer` is taken to be causal. Or name the projections, one entry per layer:
    `heads=[(query, key, num_heads, num_key_heads), …]` or `heads=[(fused, num_heads, num_key_heads), …]`.
    Fails, naming what looks like attention, where nothing is known. `tensors` replaces what is read of the model.
    """
    return (site.build() for site in sites(model, family=family, heads=heads, sample=sample, tensors=tensors))


@dataclass(frozen=True)
class Site:
    """One attention module: its name, how to read its heads as they are at that moment, and which rows they are.

    `slices` is None where its heads cannot be read.
    """

    block: Block
    number: int
    num_heads: int
    query_name: str
    key_name: str
    build: Callable[[], Layer]
    slices: Callable[[], Slices] | None = None


def sites(
    model: nn.Module,
    *,
    family: Family | None = None,
    heads: Sequence[Explicit] = (),
    sample: Sample | None = None,
    tensors: ModuleTensors | None = None,
) -> list[Site]:
    """Where the attention modules of `layers` are; nothing is read yet."""
    tensors, config = tensors or ModuleTensors(model), Config(settings(model))
    modules = named_modules(tensors.model)
    if heads:
        rows = [explicit_row(entry, modules) for entry in heads]
    elif family is not None or is_in_tables(str(config.get("model_type"))):
        return _of_family(tensors, config, family, modules)
    elif sample is not None:
        rows = discover(tensors.model, sample)
    elif config.get("model_type") is not None:
        return _of_family(tensors, config, None, modules)
    else:
        rows = list(search(modules))
    if not rows:
        raise _unknown(tensors, config, modules)
    return list(_of_modules(rows, tensors))


def _unknown(tensors: ModuleTensors, config: Config, modules: dict[str, nn.Module]) -> Refusal:
    kind = f"{type(tensors.model).__name__} of model type {config.get('model_type')!r}"
    return refusal("a live model of a known family or with known modules", kind, describe(modules))


def _of_family(
    tensors: ModuleTensors, config: Config, family: Family | None, modules: dict[str, nn.Module]
) -> list[Site]:
    try:
        all_places = open_model(config, tensors, family=family).places
    except Refusal:
        if family is not None or is_in_tables(str(config.get("model_type"))):
            raise
        raise _unknown(tensors, config, modules) from None
    return [_site(places, number) for places in all_places for number in places.layers]


def _site(places: Places, number: int) -> Site:
    names = (places.name(pattern, number) for pattern in (places.row.query, places.row.key))
    num_heads = places.shape(number).num_heads
    read, rows = partial(_read, places, number), partial(_slices, places, number)
    return Site(places.row.block, number, num_heads, *names, build=read, slices=rows)


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


def _of_modules(rows: Sequence[Found], tensors: ModuleTensors) -> Iterator[Site]:
    """Modules are numbered within their block, in the order found."""
    numbers = Counter()
    for one in rows:
        number = numbers[one.block]
        numbers[one.block] += 1
        if isinstance(one.row, Refusal):
            reason = f"{one.block} layer {number}: {one.row}"
            refused = Layer(one.block, number, (), (reason,), one.name, one.name)
            yield Site(one.block, number, 0, one.name, one.name, build=partial(_unchanged, refused))
        else:
            yield _site(Places(one.row, Config(), tensors, ""), number)


def _unchanged(layer: Layer) -> Layer:
    return layer
