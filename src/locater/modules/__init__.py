"""Live models: the heads of an `nn.Module` as views of its parameters, so that gradients flow through them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from ..errors import Refusal, refuse
from ..families import Config, Family, Layer, Places, build_layer, find_family, open_model
from .explicit import Explicit, describe, explicit_row
from .rows import Found, search
from .tensors import ModuleTensors, named_modules, settings

__all__ = ["ModuleTensors", "layers"]


def layers(
    model: nn.Module,
    *,
    family: Family | None = None,
    heads: Sequence[Explicit] = (),
    tensors: ModuleTensors | None = None,
) -> Iterator[Layer]:
    """The heads of every attention module, as views: what they say changes with the parameters.

    A model whose config names a known family is read by that family's table. Any other is searched for torch's and
    timm's attention modules, whose causality cannot be seen from outside: only `nn.TransformerDecoderLayer` is taken to
    be causal. Or name the projections: `heads=[(query, key, num_heads, num_key_heads), …]`, one entry per layer.
    Fails, naming what looks like attention, where nothing is known. `tensors` replaces what is read of the model.
    """
    tensors, config = tensors or ModuleTensors(model), Config(settings(model))
    modules = named_modules(tensors.model)
    if heads:
        found = [explicit_row(entry, modules) for entry in heads]
    elif family is not None or config.get("model_type") is not None:
        return _of_family(tensors, config, family, modules)
    else:
        found = list(search(modules))
    return _of_modules(found, tensors) if found else _of_family(tensors, config, None, modules)


def _of_family(
    tensors: ModuleTensors, config: Config, family: Family | None, modules: dict[str, nn.Module]
) -> Iterator[Layer]:
    try:
        family = family or find_family(config, tensors.names)
    except Refusal:
        kind = f"{type(tensors.model).__name__} of model type {config.get('model_type')!r}"
        raise refuse("a live model of a known family or with known modules", kind, describe(modules)) from None
    return open_model(config, tensors, family=family).layers()


def _of_modules(found: Sequence[Found], tensors: ModuleTensors) -> Iterator[Layer]:
    """Modules are numbered within their block, in the order found."""
    numbers = Counter()
    for one in found:
        number = numbers[one.block]
        numbers[one.block] += 1
        if isinstance(one.row, Refusal):
            yield Layer(one.block, number, (), (f"{one.block} layer {number}: {one.row}",), one.name, one.name)
        else:
            yield build_layer(Places(one.row, Config(), tensors, ""), number)
