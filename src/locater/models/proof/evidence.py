"""One watched pass of a twin as evidence: every softmax over keys, and its tensors under the names of a file."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from ...attention.calls import AttentionCall
from ...attention.kernels import FUNCTION, SOFTMAX
from ...errors import Refusal
from ...records import Json
from ..config import Config, resolve
from ..live.discover import Finder
from ..live.tensors import ModuleTensors
from ..live.watch import OF_PAIRS, Normed, may_be_norm
from ..module import AttentionModule
from ..neighbours import LAYER
from ..tensors import Held


@dataclass
class SoftmaxCall:
    """One softmax over keys: logits (batch, heads, queries, keys), masked ones far below zero."""

    module: str
    logits: Tensor
    explain: Callable[[], AttentionModule]
    weights: Tensor | None = None  # None where a kernel made the average
    averages: list[tuple[Tensor | None, Tensor]] = field(default_factory=list)  # what was multiplied, and the product

    @property
    def is_sunk(self) -> bool:
        """Tell whether the softmax runs over a column more than there are keys."""
        return self.logits.shape[-1] == self.logits.shape[-2] + 1

    @property
    def own(self) -> Tensor:
        """The logits of real keys: a sink's column is the last."""
        return self.logits[..., :-1] if self.is_sunk else self.logits

    @cached_property
    def found(self) -> AttentionModule:
        """The attention module that explains the call, or its reason for not being found."""
        return self.explain()

    def is_average(self, left: Tensor | None) -> bool:
        """Tell whether a product with this on its left is the average of values; a sink's column may be left out."""
        if left is None or self.weights is None:
            return left is self.weights
        own = self.weights[..., : left.shape[-1]]
        return own.numel() == left.numel() and bool((own.reshape(left.shape) - left).abs().max() <= 1e-6)


class ObservedPass:
    """One forward pass: the calls in order, and what went into and came out of every module, call by call."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        self.finder, self.batch = Finder(ModuleTensors(model)), batch
        self.calls: list[SoftmaxCall] = []
        self.inputs: dict[str, list[Tensor | None]] = defaultdict(list)
        self.outputs: dict[str, list[Tensor | None]] = defaultdict(list)

    def see(self, call: AttentionCall) -> None:
        logits = call.final() if call.logits is None else call.logits
        if logits.dim() == 3 and self.batch and logits.shape[0] % self.batch == 0:
            logits = logits.unflatten(0, (self.batch, -1))  # heads within the batch (BLOOM): else no call is seen
        if logits.dim() == 4:
            explain = partial(self.finder.explained, call, self.finder.watch.copy())
            seen = SoftmaxCall(self.finder.name_of(call), logits.detach().clone(), explain)
            self.calls.append(seen)
        self.finder.watch.next_call()

    def follow(self, func: Any, args: tuple, kwargs: Json, output: Any) -> None:
        """Keep the weights of the last call, and what they are multiplied into."""
        last = self.calls[-1] if self.calls else None
        if last is not None and func is FUNCTION:
            last.averages.append((None, output))
        elif last is not None and func in SOFTMAX and last.weights is None and output.numel() == last.logits.numel():
            last.weights = output.detach()
        elif last is not None and last.weights is not None and func in OF_PAIRS:
            left = args[0]
            if left.numel() and left.shape[-1] <= last.weights.shape[-1] and left.shape[-2] == last.weights.shape[-2]:
                last.averages.append((left, output))

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as handles:
            for name, module in model.named_modules():
                before, after = partial(self._before, name), partial(self._after, name)
                handles.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                handles.callback(module.register_forward_hook(after, always_call=True).remove)
            yield

    def _before(self, name: str, module: object, args: tuple, kwargs: Json) -> None:
        first = next((part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)), None)
        self.inputs[name].append(None if first is None else first.detach().clone())

    def _after(self, name: str, module: object, args: tuple, output: object) -> None:
        self.outputs[name].append(output.detach().clone() if isinstance(output, Tensor) else None)


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
    def norms(self) -> list[Normed]:
        """Every call of a module that may be a norm."""
        return [
            Normed(name, self.modules[name], given, made)
            for name, outputs in self.seen.outputs.items()
            if is_norm(name, self.modules[name])
            for given, made in zip(self.seen.inputs[name], outputs, strict=False)
            if given is not None and made is not None
            if given.shape != made.shape or bool((given != made).any())  # an Identity may be called so, too
        ]

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


def is_norm(name: str, module: nn.Module) -> bool:
    """Tell by its class, its name, or what it holds."""
    return may_be_norm(module) or re.search(r"norm|(^|\.)ln", name.rpartition(".")[2]) is not None


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
