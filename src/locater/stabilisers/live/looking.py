"""Stabilisers that only look: they are shown every layer's logits, whatever computes them, and replace no output.

So the model's outputs are its own to the bit, whatever the kernel and its mask.
"""

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.call_statistics import is_shifted
from ...attention.calls import AttentionCall, call_of_softmax, in_backward
from ...attention.compilation import Eagerly, in_compiled, in_shape_inference, is_full_graph
from ...attention.kernels import packed
from ...attention.outside import OutsideHook, in_full_graph
from ...errors import Refusal, refusal
from ...models.live.tensors import entry_of
from ...models.live.watch import Sample
from ..base import Find, Stabiliser
from .interception import WAY_OUT, Slots
from .pairs import Pair, num_heads


class Looker(Stabiliser):
    """Looks at the calls of its pairs' modules in passes with gradients, from `look` to `detach`.

    What cannot be read is refused in the first pass; once something was seen, a warning says so, and the run goes on.
    Where a full graph cannot be left for a look, passes that are looked at run as they were written.
    """

    slots: Slots | None = None
    handles: list[Any] = []

    def look(self, model: nn.Module, pairs: Sequence[Pair]) -> None:
        self.has_looked, self.warned = False, set[str]()
        self.is_blind: bool | None = None  # None: not known yet
        self.local = threading.local()
        self.slots = Slots(pairs, lambda name: Watcher(self, name, num_heads(pairs, name)))
        self.entry = entry = entry_of(model)
        begin, end = OutsideHook(entry, _weakly(self._begin_pass)), OutsideHook(entry, _weakly(self._end_pass))
        self.handles = [
            entry.register_forward_pre_hook(begin, with_kwargs=True),  # type: ignore[arg-type]
            entry.register_forward_hook(end, always_call=True),  # type: ignore[arg-type]
        ]

    def _begin_waiting(self, find: Find, sample: Sample) -> None:
        super()._begin_waiting(find, sample)
        if self.slots is not None:  # the call under way is looked at too: its hooks were taken before ours came
            self._begin_pass(lambda: self.entry, self.entry, (), {})

    def is_due(self) -> bool:
        """Tell whether passes are to be looked at now."""
        return True

    def attend(self, name: str, call: AttentionCall) -> None:
        """Take in one call of the module of that name."""
        raise NotImplementedError

    def show(self, name: str, call: AttentionCall) -> None:
        try:
            self.attend(name, call)
        except Refusal as reason:
            self.miss(name, reason)
        else:
            self.has_looked = True

    def miss(self, name: str, reason: Refusal) -> None:
        """A run of a module showed nothing."""
        if not self.has_looked:
            raise reason
        self.warn(f"{type(self).__name__} could not look at {name}: {reason}")

    def warn(self, words: str) -> None:
        """Once."""
        if words not in self.warned:
            self.warned.add(words)
            warnings.warn(words, stacklevel=3)

    def warn_of_nothing(self) -> None:
        """For a step in which nothing was seen: passes may have run in a full graph, or without gradients."""
        name = type(self).__name__
        if self.is_blind is not False:
            self.is_blind = None
        self.warn(
            f"{name} saw no pass with gradients since the last step, and did nothing. Inside of a model compiled with "
            f"fullgraph=True it sees none: attach to what torch.compile returned, {name}(compiled, …)"
        )

    def _begin_pass(self, own: Any, module: nn.Module, args: object, kwargs: object) -> None:
        if own() is not module:
            return
        if self.is_blind is None:
            self.is_blind = any(is_full_graph(one) for one in module.modules())
        is_wanted = self.is_blind and torch.is_grad_enabled() and self.is_due() and not in_backward()
        outside = not (in_compiled() and in_full_graph())
        mode = Eagerly(within_compiled=in_compiled()) if is_wanted and outside else None
        self._passes().append(mode and mode.__enter__())

    def _end_pass(self, own: Any, module: nn.Module, *given: object) -> None:
        if own() is module and self._passes() and (mode := self._passes().pop()) is not None:
            mode.__exit__()

    def _passes(self) -> list[Eagerly | None]:
        if not hasattr(self.local, "passes"):
            self.local.passes = []
        return self.local.passes

    def detach(self) -> None:
        super().detach()
        if self.slots is not None:
            self.slots.remove()
        while self.handles:
            self.handles.pop().remove()


class Watcher:
    """The handler of one module: shows its calls to a stabiliser, which lives elsewhere. In a copy it does nothing."""

    def __init__(self, looker: Looker, name: str, num_heads: int) -> None:
        self.looker, self.name, self.num_heads = weakref.ref(looker), name, num_heads

    def visit(self) -> "_Run | None":
        looker = self.looker()
        if looker is None or not torch.is_grad_enabled() or not looker.is_due() or in_shape_inference():
            return None
        return _Run(looker, self.name, self.num_heads)

    def __reduce__(self) -> tuple[object, ...]:
        return _Passing, ()


class _Passing:
    def visit(self) -> None:
        """Leave the module alone."""


class _Run:
    """One run of a module: the calls of its kernels; where it called none, the softmax that it computes itself."""

    written_out = True

    def __init__(self, looker: Looker, name: str, num_heads: int) -> None:
        self.looker, self.name, self.num_heads = looker, name, num_heads
        self.softmaxes: list[AttentionCall] = []
        self.reason: Refusal | None = None
        self.number = 0

    def __call__(self, call: AttentionCall) -> None:
        if call.unreadable is not None:
            self.reason = call.unreadable
        elif call.logits is not None:
            self.softmaxes += map(call_of_softmax, self._heads_of(call.logits))
        else:
            self._show(call)

    def _heads_of(self, logits: Tensor) -> list[Tensor]:
        """The logits with a dimension for texts and one for heads; none where they are not those of the heads."""
        if logits.dim() == 3 and len(logits) % self.num_heads == 0:
            return [logits.unflatten(0, (-1, self.num_heads))]
        if logits.dim() > 3 and math.prod(logits.shape[1:-2]) == self.num_heads:
            return [logits.flatten(1, -3)]
        return []

    def _show(self, call: AttentionCall) -> None:
        self.number += 1
        try:
            call = packed(call)
        except Refusal as reason:
            self.reason = reason
        else:
            self.looker.show(self.name, call)

    def end(self) -> None:
        for call in self.softmaxes if not self.number and self.reason is None else ():
            if call.logits is not None and not is_shifted(call.logits):
                self._show(call)
        if self.reason is None and not self.number:
            kinds = "attention that calls a kernel, or a softmax of its heads' logits"
            self.reason = refusal(kinds, f"another way in {self.name}", WAY_OUT)
        if self.reason is not None:
            self.looker.miss(self.name, self.reason)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Call a method for as long as its stabiliser lives: the model's hooks do not keep it."""
    known = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        if (method := known()) is not None:
            method(*given)

    return call
