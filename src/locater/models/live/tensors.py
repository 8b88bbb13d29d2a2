"""A live module as named tensors: views of its parameters, under the names that a file would have."""

import dataclasses
from collections.abc import KeysView, Mapping
from typing import Any

from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...errors import refusal

# What compilation, checkpointing of activations and sharding put between a module and its name.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class ModuleTensors:
    """The tensors of a model as the family tables read them; `read` gives views, so gradients flow.

    A parametrised weight is computed anew at every `read`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap(model)
        self.owners = {
            f"{module_name}.{name}".lstrip("."): (module, name)
            for module_name, module in named_modules(self.model).items()
            for name in _own_names(module)
        }

    @property
    def names(self) -> KeysView[str]:
        return self.owners.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.read(name).shape)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Shaped[Tensor, "..."]:
        if name not in self.owners:
            raise refusal(f"the name of a tensor in {type(self.model).__name__}", name)
        module, attribute = self.owners[name]
        tensor = getattr(module, attribute)
        return tensor if rows is None else tensor[rows[0] : rows[1]]


def unwrap(model: nn.Module) -> nn.Module:
    """The model that compilation or data parallelism wraps."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    inner = next((getattr(model, wrapper) for wrapper in WRAPPERS if wrapper in model._modules), None)
    return model if inner is None else unwrap(inner)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its name without wrappers; a module that stands in two places has two names."""
    named = {}
    for name, module in model.named_modules(remove_duplicate=False):
        named[".".join(part for part in name.split(".") if part not in WRAPPERS)] = module
    return named


def settings(model: nn.Module) -> dict[str, Any]:
    """The model's config as a table, whatever kind of object it is; empty where it has none."""
    config: Any = getattr(unwrap(model), "config", None)
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    return dict(config) if isinstance(config, Mapping) else {}


def _own_names(module: nn.Module) -> list[str]:
    stored = {**module._parameters, **module._buffers}
    names = [name for name, tensor in stored.items() if tensor is not None]
    return names + (list(module.parametrizations) if parametrize.is_parametrized(module) else [])  # type: ignore
