"""Observe a model's own attention: every softmax over keys, with the inputs and outputs of all modules.

A function mode sees the softmax (or the fused kernel) wherever it is called; module hooks say inside which module.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...attention.kernels import read_fused
from ...records import Json

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
PRODUCT = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)


@dataclass
class SoftmaxCall:
    """One softmax over keys: logits (batch, heads, queries, keys), masked ones far below zero."""

    module: str
    logits: Tensor
    weights: Tensor | None
    averages: list[Any] = field(default_factory=list)  # what the weights were multiplied into

    @property
    def is_sunk(self) -> bool:
        """Tell whether the softmax runs over a column more than there are keys."""
        return self.logits.shape[-1] == self.logits.shape[-2] + 1

    @property
    def own(self) -> Tensor:
        """The logits of real keys: a sink's column is the last."""
        return self.logits[..., :-1] if self.is_sunk else self.logits


@dataclass
class ObservedPass:
    """One forward pass: the calls in order, and what went into and came out of every module, call by call."""

    calls: list[SoftmaxCall] = field(default_factory=list)
    inputs: dict[str, list[Tensor | None]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, list[Tensor | None]] = field(default_factory=lambda: defaultdict(list))


class _Watcher(TorchFunctionMode):
    def __init__(self, seen: ObservedPass, stack: list[str], batch: int) -> None:
        super().__init__()
        self.seen, self.stack, self.batch = seen, stack, batch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            source = args[0] if args else kwargs["input"]
            if dim in (-1, source.dim() - 1):
                self._add(source, out)
        elif func is F.scaled_dot_product_attention:
            call = read_fused(*args, **kwargs)
            self._add(call.masked(call.raw()), None)
            if self.seen.calls:
                self.seen.calls[-1].averages.append(out)
        elif func in PRODUCT and self.seen.calls and (last := self.seen.calls[-1]).weights is not None:
            left = args[0]
            if left.numel() and left.shape[-1] <= last.weights.shape[-1] and left.shape[-2] == last.weights.shape[-2]:
                last.averages.append((left, out))
        return out

    def _add(self, logits: Tensor, weights: Tensor | None) -> None:
        name = self.stack[-1] if self.stack else ""
        if logits.dim() == 3 and self.batch and logits.shape[0] % self.batch == 0:
            logits = logits.unflatten(0, (self.batch, -1))  # heads within the batch (BLOOM): else no call is seen
        if logits.dim() == 4:
            kept = None if weights is None else weights.detach()
            self.seen.calls.append(SoftmaxCall(name, logits.detach().clone(), kept))


@contextmanager
def _hooked(model: nn.Module, seen: ObservedPass, stack: list[str]) -> Iterator[None]:
    with ExitStack() as handles:
        for name, module in model.named_modules():
            before, after = partial(_before, name, seen, stack), partial(_after, name, seen, stack)
            handles.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            handles.callback(module.register_forward_hook(after, always_call=True).remove)
        yield


def _before(name: str, seen: ObservedPass, stack: list[str], module: object, args: tuple, kwargs: Json) -> None:
    stack.append(name)
    first = next((part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)), None)
    seen.inputs[name].append(None if first is None else first.detach().clone())


def _after(name: str, seen: ObservedPass, stack: list[str], module: object, args: tuple, output: object) -> None:
    if stack and stack[-1] == name:
        stack.pop()
    seen.outputs[name].append(output.detach().clone() if isinstance(output, Tensor) else None)


Offers = Callable[[Any], Iterable[Mapping[str, Tensor]]]  # the inputs worth trying on a model


def observe_twin(model: nn.Module, inputs: Mapping[str, Tensor], offers: Offers = lambda part: ()) -> ObservedPass:
    """One pass of the model, watched; then one of each model inside it that has not run, such as an image tower."""
    seen, stack = ObservedPass(), []
    batch = len(next(iter(inputs.values())))
    with _hooked(model, seen, stack), _Watcher(seen, stack, batch):
        model(**inputs)
        for name, part in model.named_modules():
            if name and hasattr(part, "main_input_name") and not _has_run(name, seen):
                _run_alone(part, offers(part), seen, stack)
    return seen


def _has_run(name: str, seen: ObservedPass) -> bool:
    return any(calls and (other == name or other.startswith(f"{name}.")) for other, calls in seen.inputs.items())


def _run_alone(part: nn.Module, offers: Iterable[Mapping[str, Tensor]], seen: ObservedPass, stack: list[str]) -> None:
    """The first inputs that it takes; what a failed try has left is taken back."""
    for inputs in offers:
        num_calls, known = len(seen.calls), {name: len(calls) for name, calls in seen.inputs.items()}
        try:
            part(**inputs)
            return
        except Exception:
            stack.clear()
            del seen.calls[num_calls:]
            for record in (seen.inputs, seen.outputs):
                for name, calls in record.items():
                    del calls[known.get(name, 0) :]
