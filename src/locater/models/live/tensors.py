"""A live module as named tensors: views of its parameters, under the names that a file would have.

What compilation, checkpointing of activations, data parallelism, sharding and adapters wrap around a model is taken off
here, for all tools alike.
"""

import dataclasses
from collections.abc import KeysView, Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...errors import refusal
from ...projections import whole
from ...records import Json

NUM_ENTRIES = 64  # of a weight by which it is recognised
# What compilation, checkpointing of activations and sharding put between a module and its name.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class ModuleTensors:
    """The tensors of a model as the family tables read them; `read` gives views, so gradients flow.

    A parametrised or adapted weight is computed anew at every `read`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.given, self.model = model, unwrap(model)
        modules = named_modules(self.model)
        self.adapters = {id(m.base_layer): m for m in modules.values() if is_adapter(m)}
        self.owners = {
            f"{module_name}.{name}".lstrip(".").replace(".base_layer.", "."): (module, name)
            for module_name, module in modules.items()
            if not _is_part_of_weight(module_name, modules)
            for name in _own_names(module)
        }

    @property
    def names(self) -> KeysView[str]:
        return self.owners.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        module, attribute = self._owner(name)
        tensor = held(module, attribute)
        return tuple(getattr(tensor, "ds_shape", tensor.shape))  # DeepSpeed ZeRO-3 leaves an empty placeholder

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Shaped[Tensor, "..."]:
        module, attribute = self._owner(name)
        tensor = held(module, attribute)
        if type(module).__module__.partition(".")[0] == "bitsandbytes" and not tensor.is_floating_point():
            raise refusal(f"floating-point weights in `{name}`", "a quantised module", "call model.dequantize() first")
        if tensor.shape != getattr(tensor, "ds_shape", tensor.shape):
            remedy = "read it within deepspeed.zero.GatheredParameters(list(model.parameters()))"
            raise refusal(f"the whole of `{name}`", "a placeholder: DeepSpeed ZeRO-3 has partitioned it", remedy)
        if attribute == "weight" and id(module) in self.adapters:
            tensor = adapted(tensor, self.adapters[id(module)])
        return tensor if rows is None else tensor[rows[0] : rows[1]]

    def is_stored(self, name: str) -> bool:
        """True if the weight is a parameter itself, not computed from others."""
        module, attribute = self._owner(name)
        return is_stored(module, attribute, self.adapters.get(id(module)))

    def parameter(self, name: str) -> Tensor:
        """The parameter itself, without adapters."""
        return held(*self._owner(name))

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        if name not in self.owners:
            raise refusal(f"the name of a tensor in {type(self.model).__name__}", name)
        return self.owners[name]


class WholeTensors(ModuleTensors):
    """A live model's tensors for looking at: never part of the graph, and gathered where they are sharded.

    FSDP gathers a block's own before it runs; tensor parallelism does not. Gathering is a collective call: all
    processes come by here alike, since all run the same layers.
    """

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(super().read(name).shape)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        tensor = whole(super().read(name).detach())
        return tensor if rows is None else tensor[rows[0] : rows[1]]


def held(module: nn.Module, attribute: str) -> Tensor:
    """Return a module's tensor. What computes it does so as in evaluation: to look must not turn what it iterates."""
    parts = module.parametrizations[attribute].modules() if parametrize.is_parametrized(module, attribute) else ()  # type: ignore
    training = [part for part in parts if part.training]
    for part in training:
        part.training = False
    try:
        return getattr(module, attribute)
    finally:
        for part in training:
            part.training = True


def unwrap(model: nn.Module) -> nn.Module:
    """The model that compilation, data parallelism or an adapter library wraps."""
    model = called(model)
    return unwrap(model.get_base_model()) if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def called(model: nn.Module) -> nn.Module:
    """The model as its user calls it, without compilation and data parallelism; adapters may do more than its own."""
    inner = _wrapped(model)
    return model if inner is None else called(inner)


def _wrapped(model: nn.Module) -> nn.Module | None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return model.module
    return next((model._modules[wrapper] for wrapper in WRAPPERS if wrapper in model._modules), None)


def entry_of(model: nn.Module) -> nn.Module:
    """Return the module whose calls are the model's passes: the one that `torch.compile` made, else the innermost.

    Data-parallel and sharding wrappers call the model inside, which may be called by itself as well.
    """
    inner = None if "_orig_mod" in model._modules else _wrapped(model)
    return model if inner is None else entry_of(inner)


def _is_part_of_weight(name: str, modules: dict[str, nn.Module]) -> bool:
    """Tell whether a module is an adapter's own or a parametrisation: what it holds is in the weight that is read."""
    if "parametrizations" in name.split("."):
        return True
    outer, _, last = name.rpartition(".")
    while outer:
        if is_adapter(modules.get(outer)):
            return last != "base_layer"
        outer, _, last = outer.rpartition(".")
    return False


def is_adapter(module: object) -> bool:
    """Tell whether a module of peft changes what the projection inside it does."""
    return isinstance(getattr(module, "base_layer", None), nn.Module) and hasattr(module, "active_adapters")


def is_stored(module: nn.Module, attribute: str, adapter: Any) -> bool:
    """True if what a module holds under this name is a parameter that nothing is added to."""
    return module._parameters.get(attribute) is not None and (adapter is None or adapter.merged)


def adapted(weight: Tensor, adapter: Any) -> Tensor:
    """The weight that a projection has with its active adapters: W + Σ s·BA (LoRA), its rows rescaled by DoRA.

    DoRA: m·(W + sBA)/‖W + sBA‖, row by row, with the length held constant for the gradient, as peft holds it.
    """
    if adapter.merged or adapter.disable_adapters:
        return weight
    if not hasattr(adapter, "lora_A"):
        raise refusal("an adapter of the kinds LoRA and DoRA", type(adapter).__name__, "merge it first")
    active = [name for name in adapter.active_adapters if name in adapter.lora_A]
    magnitudes = getattr(adapter, "lora_magnitude_vector", {})
    if len(active) > 1 and any(name in magnitudes for name in active):
        raise refusal("one active adapter with DoRA", ", ".join(active), "merge them first")
    for name in active:
        _check_plain(adapter, name)
        weight = weight + adapter.get_delta_weight(name)
        if name in magnitudes:
            across = 0 if getattr(adapter, "fan_in_fan_out", False) else 1
            lengths = torch.linalg.vector_norm(weight, dim=across).detach()
            weight = weight * (magnitudes[name].weight / lengths).unsqueeze(across)
    return weight


def _check_plain(adapter: Any, name: str) -> None:
    """Refuse LoRA that does more than add to a weight: other variants than DoRA, other parts, a bias of its own."""
    variant = type(dict(getattr(adapter, "lora_variant", {})).get(name)).__name__
    if not variant.startswith(("Dora", "NoneType")):
        raise refusal("an adapter of the kinds LoRA and DoRA", variant, "merge it first")
    drop = dict(adapter.lora_dropout).get(name)
    kinds = {type(adapter.lora_A[name]), type(adapter.lora_B[name])} - {nn.Linear, nn.Conv1d, nn.Conv2d}
    if other := {kind.__qualname__ for kind in kinds | {type(drop)} - {nn.Dropout, nn.Identity, type(None)}}:
        raise refusal("an adapter of two linear maps", ", ".join(sorted(other)), "merge it first")
    if getattr(adapter.lora_B[name], "bias", None) is not None:
        raise refusal("an adapter that changes a weight alone", "one with lora_bias", "merge it first")


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module by its name without wrappers; a module that stands in two places has two names."""
    named = {}
    for name, module in model.named_modules(remove_duplicate=False):
        named[".".join(part for part in name.split(".") if part not in WRAPPERS)] = module
    return named


def entries_of(weight: Tensor | None) -> tuple[float, ...]:
    """Some entries of a weight, by which its replicas on other processes are recognised; none of one that is spread."""
    if weight is None or weight.is_meta or not weight.numel() or hasattr(weight, "placements"):
        return ()
    flat = weight.detach().flatten()
    return tuple(flat[:: max(1, len(flat) // NUM_ENTRIES)][:NUM_ENTRIES].double().cpu().tolist())


def settings(model: nn.Module) -> Json:
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
