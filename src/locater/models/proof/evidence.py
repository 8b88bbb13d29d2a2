"""One watched pass of a twin as evidence: its tensors under the names of a file, and the attention that it made."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import Refusal
from ...records import Json
from ..config import Config, resolve
from ..neighbours import LAYER
from ..tensors import Held
from .observe import ObservedPass, SoftmaxCall


@dataclass(frozen=True)
class Calls:
    """The attention calls of one place of a twin, such as `model.layers.{layer}.self_attn`, by layer."""

    evidence: "Evidence"
    place: str
    length: int  # of the list of layers, attention or not
    by_layer: dict[int, list[SoftmaxCall]]

    def name(self, layer: int) -> str:
        return self.place.format(layer=layer)

    @property
    def first(self) -> int:
        return next(iter(self.by_layer))

    @property
    def owner(self) -> str:
        """The attention module of the first layer."""
        return self.name(self.first)

    @cached_property
    def rows(self) -> list[Any]:
        """Rows that the finder found, with plain numbers, one for every layer; none where one is missing."""
        found = [seen[0].found for seen in self.by_layer.values()]
        return [] if self.reason else [module.row for module in found]

    @cached_property
    def reason(self) -> str | None:
        """Reason for which a layer could not be explained."""
        found = ((seen[0].module, seen[0].found.reason) for seen in self.by_layer.values())
        named = ((name, reason.partition(";")[0]) for name, reason in found if reason is not None)
        return next((reason.removeprefix(f"{name}: ") for name, reason in named), None)

    @cached_property
    def path(self) -> str | None:
        """The part of the composite config that the modules were given."""
        name, evidence = self.owner, self.evidence
        while name and not hasattr(evidence.modules[name], "config"):
            name = name.rpartition(".")[0]
        own = getattr(evidence.modules[name], "config", evidence.model.config)
        return _path(evidence.model.config, own)

    @cached_property
    def config(self) -> Config:
        """The part of the config that describes them."""
        return self.evidence.config.within(self.path)

    def pattern(self, module: str) -> str:
        return self.evidence.pattern(module, self.first)

    def values(self, cell: Any) -> list[Any]:
        """A cell's value in every layer that attends; none where the config does not say it."""
        try:
            return [resolve(cell, self.config, layer) for layer in self.by_layer]
        except Refusal:
            return []

    def rule(self, rules: Mapping[str, Any], wanted: list[Any]) -> str | None:
        """The name of the first rule that gives these values in the layers that attend."""
        return next((name for name, rule in rules.items() if self.values(rule) == wanted), None)


@dataclass
class Evidence:
    """Observations of a twin."""

    model: Any
    seen: ObservedPass

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules(remove_duplicate=False))

    @cached_property
    def tensors(self) -> Held:
        """Under the names that `save_pretrained` would write."""
        return Held(_saved(self.model))

    @cached_property
    def config(self) -> Config:
        return Config(expanded(self.model.config))

    @cached_property
    def file_names(self) -> dict[str, str]:
        """From a parameter's name in the model to its name in the file, where it is stored as it is."""
        known: dict[object, str] = {}
        for name, tensor in self.tensors.tensors.items():
            known.setdefault(_mark(tensor), name)
        own = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        return {name: known[mark] for name, tensor in own.items() if (mark := _mark(tensor)) in known}

    @cached_property
    def module_names(self) -> dict[str, str]:
        """From a module's name in the file to its name in the model."""
        pairs = ((file.rpartition(".")[0], own.rpartition(".")[0]) for own, file in self.file_names.items())
        return {file: own for file, own in pairs if file}

    # ------------------------------------------------------------------------------------------------------- names
    def file_module(self, module: str) -> str:
        """A module's name in the file, or a bare parameter's."""
        if module in self.file_names:
            return self.file_names[module]
        for weight in (f"{module}.weight", f"{module}_weight"):
            if weight in self.file_names:
                return self.file_names[weight].removesuffix(weight.removeprefix(module))
        return module

    def other_form(self, name: str) -> str:
        """With the base model's prefix taken off, or put on: a file may hold the model with its head or without."""
        base = f"{getattr(self.model, 'base_model_prefix', '')}."
        return name.removeprefix(base) if name.startswith(base) or base == "." else base + name

    def pattern(self, module: str, number: int, token: str = "{layer}") -> str:
        """The module's name in files and in the model, in both forms, with the layer's number as a token."""
        names = dict.fromkeys([self.file_module(module), module])
        both = [*names, *map(self.other_form, names)]
        return "|".join(dict.fromkeys(self.with_number(name, number, token) for name in both))

    @staticmethod
    def with_number(name: str, number: int, token: str) -> str:
        """The first place of this number taken by the token."""
        return re.sub(rf"(?<=\.){number}(?=\.|$)|^{number}(?=\.)", token, name, count=1)

    def places(self) -> Iterator[Calls]:
        """Group the calls by stack: attention modules whose names differ in the layer's number only."""
        found: dict[str, dict[int, list[SoftmaxCall]]] = {}
        for call in self.seen.calls:
            pattern, layer = self._place(self._owner(call.module))
            found.setdefault(pattern, {}).setdefault(layer, []).append(call)
        for pattern, calls in found.items():
            yield Calls(self, pattern, self._length(pattern), dict(sorted(calls.items())))

    def _owner(self, name: str) -> str:
        """The module itself, or where it is no more than a softmax the nearest around it that projects."""
        # Without this a softmax in a module of its own would have no projections, and its type would be refused.
        while name and not any(parameter.dim() == 2 for parameter in self.modules[name].parameters()):
            name = name.rpartition(".")[0]
        return name

    def _length(self, pattern: str) -> int:
        owner = self.modules.get(pattern.partition(".{layer}")[0])
        return len(owner) if isinstance(owner, nn.ModuleList | nn.Sequential) else 1  # type: ignore[arg-type]

    def _place(self, name: str) -> tuple[str, int]:
        """The first number that counts layers: its owner is a list of more than one."""
        for match in LAYER.finditer(name):
            owner = self.modules.get(name[: match.start()].rstrip("."))
            if isinstance(owner, nn.ModuleList | nn.Sequential):
                return name[: match.start()] + "{layer}" + name[match.end() :], int(match[0])
        return name, 0


def _saved(model: Any) -> dict[str, Tensor]:
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return dict(revert_weight_conversion(model, dict(state)))
    except Exception:  # not every conversion can be turned back at this size: then files are read by the model's names
        return state


def _mark(tensor: Tensor) -> tuple:
    """Equal for equal tensors; random weights never share it."""
    flat = tensor.detach().flatten()
    return (tuple(tensor.shape), float(flat.double().sum()), float(flat[0]) if len(flat) else 0.0)


def same(left: Tensor, right: Tensor, tolerance: float = 1e-6) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    return left.shape == right.shape and bool((left - right).abs().max() <= tolerance * (1 + right.abs().max()))


def is_norm(name: str, module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() or re.search(r"norm|(^|\.)ln", name.rpartition(".")[2]) is not None


def norm_behind(evidence: Evidence, x: Tensor) -> str | None:
    """The norm whose output this is, as a whole or put together from its calls: in chunks, in windows, reshaped."""
    outputs = {name: made for name, made in evidence.seen.outputs.items() if is_norm(name, evidence.modules[name])}
    for name, made in outputs.items():
        if any(y is not None and y.shape == x.shape and torch.equal(y, x) for y in made):
            return name
    return next((name for name in outputs if normed_rows(evidence, name, x)), None)


def normed_rows(evidence: Evidence, name: str, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """The rows of x that are not zero, and what the norm was given for each; None unless it made all of them."""
    calls = zip(evidence.seen.inputs[name], evidence.seen.outputs[name], strict=False)
    calls = [(given, made) for given, made in calls if given is not None and made is not None]
    pairs = [(given.flatten(0, -2), made.flatten(0, -2)) for given, made in calls if given.shape == made.shape]
    pairs = [(given, made) for given, made in pairs if made.shape[-1] == x.shape[-1]]
    wanted = x.flatten(0, -2)
    wanted = wanted[wanted.any(-1)]  # what pads a window
    if not pairs or not len(wanted):
        return None
    given, made = (torch.cat(side) for side in zip(*pairs, strict=True))
    places = {row.numpy().tobytes(): number for number, row in enumerate(made)}
    found = [places.get(row.numpy().tobytes()) for row in wanted]
    numbers = [number for number in found if number is not None]
    return (wanted, given[numbers]) if len(numbers) == len(found) else None


def _path(config: object, own: object) -> str | None:
    if config is own:
        return None
    for key, part in vars(config).items():
        if hasattr(part, "to_dict"):
            if part is own:
                return key
            if (further := _path(part, own)) is not None:
                return f"{key}.{further}"
    return None


def expanded(config: Any) -> Json:
    """A config object as a table with every default filled in, also under transformers' common names."""
    values = config.to_dict()
    for part in (key for key, value in vars(config).items() if hasattr(value, "to_dict")):
        values[part] = expanded(getattr(config, part))
    common = {key: getattr(config, key, None) for key in getattr(config, "attribute_map", {})}
    return {**values, **{key: value for key, value in common.items() if isinstance(value, int | float | str)}}
