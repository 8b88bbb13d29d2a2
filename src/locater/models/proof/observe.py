"""Observe a model's own attention: every softmax over keys, with the inputs and outputs of all modules."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from ...attention.calls import AttentionCall
from ...attention.interception import Interception
from ...attention.kernels import FUNCTION, SOFTMAX
from ...records import Json
from ..live.discover import Finder
from ..live.tensors import ModuleTensors
from ..live.watch import OF_PAIRS
from ..module import AttentionModule


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


Offers = Callable[[Any], Iterable[Mapping[str, Tensor]]]  # the inputs worth trying on a model


def observe_twin(model: nn.Module, inputs: Mapping[str, Tensor], offers: Offers = lambda part: ()) -> ObservedPass:
    """One pass of the model, watched; then one of each model inside it that has not run, such as an image tower."""
    seen = ObservedPass(model, len(next(iter(inputs.values()))))

    def follow_both(*done: Any) -> None:
        follow(*done)
        seen.follow(*done)

    with (
        seen.hooked(model),
        seen.finder.recording() as follow,
        Interception(seen.see, written_out=True, follow=follow_both),
    ):
        model(**inputs)
        for name, part in model.named_modules():
            if name and hasattr(part, "main_input_name") and not _has_run(name, seen):
                _run_alone(part, offers(part), seen)
    return seen


def _has_run(name: str, seen: ObservedPass) -> bool:
    return any(calls and (other == name or other.startswith(f"{name}.")) for other, calls in seen.inputs.items())


def _run_alone(part: nn.Module, offers: Iterable[Mapping[str, Tensor]], seen: ObservedPass) -> None:
    """The first inputs that it takes; what a failed try has left is taken back."""
    for inputs in offers:
        num_calls, known = len(seen.calls), {name: len(calls) for name, calls in seen.inputs.items()}
        try:
            part(**inputs)
            return
        except Exception:
            del seen.calls[num_calls:]
            for record in (seen.inputs, seen.outputs):
                for name, calls in record.items():
                    del calls[known.get(name, 0) :]
