"""A model of transformers that runs from its file: one layer's weights are in memory at a time.

Its modules are made without numbers; each layer reads its own when it is called and lets them go afterwards. Of large
tables only the rows that are looked up are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from .. import checkpoints
from ..attention.capture import Take, inputs_of
from ..checkpoints import Checkpoint
from ..errors import Refusal
from ..models import Config, open_model
from ..models.module import AttentionModule
from .language_model import quiet_loading, registered_loader, short_reason, transformers_here

# Tables with more numbers than this are read by the rows that are looked up.
LARGE = 2**24
# What older releases stored beside the weights: masks and frequencies, made anew by the module.
MADE_ANEW = (".inv_freq", ".masked_bias", ".position_ids", ".attn.bias", ".attention.bias")


class WithoutNumbers(TorchFunctionMode):
    """`torch.empty`, by which modules make their weights, gives none; what is computed (frequencies) is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty:
            options["device"] = "meta"
        return func(*args, **options)


@dataclass(frozen=True)
class FileWeights:
    """The model's parameters and buffers by their own names, each under the name that the file has for it."""

    checkpoint: Checkpoint
    stored: Mapping[str, str]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        tensor = self.checkpoint.read(self.stored[name], rows)
        return tensor.float() if tensor.is_floating_point() else tensor

    def fill(self, model: nn.Module, names: Sequence[str]) -> None:
        for name in names:
            _put(model, name, self.read(name))

    def empty(self, model: nn.Module, names: Sequence[str]) -> None:
        for name in names:
            _put(model, name, torch.empty(self.checkpoint.shape(self.stored[name]), device="meta"))


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, own = name.rpartition(".")
    module = model.get_submodule(owner)
    if own in module._parameters:
        module._parameters[own] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[own] = tensor


class CannotStream(Refusal):
    """The file is not, tensor by tensor, what transformers makes of the model."""


@dataclass(frozen=True)
class Streamed:
    """A model whose layers read their weights when they are called."""

    module: nn.Module
    attention: list[AttentionModule]

    @torch.no_grad()
    def run(self, chosen: Sequence[AttentionModule], ids: Int[Tensor, "batch tokens"], take: Take) -> None:
        """One pass; `take(number, x)` gets the inputs of the chosen attention modules as they come."""
        names = [one.query_name.removeprefix(_prefix(self.module)) for one in chosen]
        with inputs_of(dict(self.module.named_modules()), names, take):
            self.module(input_ids=ids, **({"use_cache": False} if hasattr(self.module.config, "use_cache") else {}))


@contextmanager
def streamed(source: str | PathLike[str]) -> Iterator[Streamed]:
    """The model at a directory or hub id in float32, ready to be run.

    Memory: the weights of one layer, those outside of layers, and the rows that are looked up. `CannotStream` where
    names or shapes of the file are not those of the model that transformers makes, or where it has several stacks.
    """
    if registered_loader(source) is not None or Path(source).expanduser().is_file():
        raise CannotStream(f"expected a directory or a hub id, got {fspath(source)}")
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(checkpoints.open(source))
            module = _build_empty(fspath(source))
            weights = FileWeights(checkpoint, _stored_names(module, checkpoint))
            found = Streamed(module.eval(), _attention(checkpoint))
        except Refusal as reason:
            raise CannotStream(str(reason)) from None
        stack.enter_context(_filled_when_called(module, weights))
        yield found


def _prefix(module: nn.Module) -> str:
    """Begins the names of stored tensors that are those of a part of a larger model."""
    return f"{getattr(module, 'base_model_prefix', '')}."


def _attention(checkpoint: Checkpoint) -> list[AttentionModule]:
    """Every attention module of the one stack that there is."""
    found = open_model(Config(checkpoint.config), checkpoint).modules()
    blocks = {attention.block for attention in found}
    if len(blocks) > 1 or blocks & {"cross", "vision"}:
        raise CannotStream(f"expected one stack of self-attention, got {len(blocks)}")
    return sorted(found, key=lambda attention: attention.number)


@contextmanager
def _filled_when_called(model: nn.Module, weights: FileWeights) -> Iterator[None]:
    names = {stage: [name for name in weights.stored if name.startswith(stage + ".")] for stage in _stages(model)}
    inside = {name for own in names.values() for name in own}
    tables = _large_tables(model, weights, inside)
    weights.fill(model, [name for name in weights.stored if name not in inside | set(tables.values())])
    with ExitStack() as stack:
        for stage, own in names.items():
            for handle in _fill_when_called(model, stage, own, weights):
                stack.callback(handle.remove)
        for table, name in tables.items():
            stack.callback(_look_up(model.get_submodule(table), name, weights).remove)
        yield


def _build_empty(place: str) -> nn.Module:
    """Build the model that transformers makes of the config, without memory for its weights."""
    transformers = transformers_here()
    with quiet_loading(transformers), WithoutNumbers():
        try:
            config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
            if hasattr(config, "quantization_config"):  # the weights are unpacked while they are read
                del config.quantization_config
            return transformers.AutoModel.from_config(config, dtype=torch.float32, trust_remote_code=False)
        except Exception as reason:
            raise CannotStream(f"expected a model that transformers makes, got {short_reason(reason)}") from None


def _stored_names(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Every parameter and lasting buffer has its tensor, of its shape, and no tensor of this part is left over."""
    prefix = _prefix(model)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {}
    for name, shape in wanted.items():
        stored = next((one for one in (prefix + name, name) if one in checkpoint.names), None)
        if stored is None or checkpoint.shape(stored) != shape:
            got = "none" if stored is None else list(checkpoint.shape(stored))
            raise CannotStream(f"expected a tensor {name} of shape {list(shape)}, got {got}")
        found[name] = stored
    begins = prefix if any(name.startswith(prefix) for name in found.values()) else ""
    left = {name for name in checkpoint.names if name.startswith(begins)} - set(found.values())
    left = {name for name in left if not name.endswith(MADE_ANEW) and (begins or not name.startswith("lm_head."))}
    if left:
        raise CannotStream(f"expected only tensors that the model has, got {min(left)}")
    return found


def _stages(model: nn.Module) -> list[str]:
    """The members of the outermost lists of modules."""
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(one + ".") for one in found):
            found += [f"{name}.{number}" for number in range(len(module))]
    return found


def _large_tables(model: nn.Module, weights: FileWeights, inside: set[str]) -> dict[str, str]:
    """The weight of every large table outside of the layers, by the name of its module."""
    found = {}
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if not isinstance(module, nn.Embedding) or weight in inside or weight not in weights.stored:
            continue
        if prod(weights.checkpoint.shape(weights.stored[weight])) > LARGE:
            found[name] = weight
    return found


def _fill_when_called(model: nn.Module, stage: str, names: list[str], weights: FileWeights) -> list[RemovableHandle]:
    module = model.get_submodule(stage)
    weights.empty(model, names)
    return [
        module.register_forward_pre_hook(lambda *_: weights.fill(model, names)),
        module.register_forward_hook(lambda *_: weights.empty(model, names), always_call=True),
    ]


def _look_up(table: nn.Module, name: str, weights: FileWeights) -> RemovableHandle:
    """Only the rows that are looked up: memory that is asked for and never touched takes no place."""

    def read_rows(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = torch.empty(weights.checkpoint.shape(weights.stored[name]))
        for number in args[0].unique().tolist():
            rows[number] = weights.read(name, (number, number + 1))[0]
        module._parameters["weight"] = nn.Parameter(rows, requires_grad=False)

    return table.register_forward_pre_hook(read_rows)
