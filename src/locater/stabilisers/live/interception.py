"""A slot in anyone's attention: every call of an attention kernel within a module goes to handlers.

The queries and keys seen there are the real ones, per head, norms and rotary positions included. A slot belongs to its
module: a copy of the module has a slot of its own, with handlers that know nothing of the original.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.calls import SDPA, AttentionCall
from ...attention.interception import Interception
from ...errors import refusal
from .pairs import Pair

Handler = Callable[[nn.Module, AttentionCall], Tensor | None]  # what to give in place of the kernel's output, if any
FORWARD = "forward"


class Slots:
    """One handler in every attention module of the pairs; `remove()` leaves no trace, in any order, as often as called.

    A handler must be picklable: it goes with a copy of the model, so it either holds no state of the original, or is a
    `Watcher`.
    """

    def __init__(self, pairs: Iterable[Pair], handler: Callable[[str], Handler]) -> None:
        named: dict[nn.Module, str] = {}
        for pair in pairs:
            named.setdefault(pair.query.weight.attention, pair.name)
        self.removals = [_attach(module, name, handler(name)) for module, name in named.items()]

    def remove(self) -> None:
        while self.removals:
            self.removals.pop()()


class Watcher:
    """A handler that shows each call to a stabiliser, which lives elsewhere, and leaves the output to the kernel.

    So the model's output is its own to the bit, whatever the kernel and its mask. In a copy it does nothing.
    """

    def __init__(self, watch: Callable[[str, AttentionCall], None], name: str) -> None:
        self.watch, self.name = weakref.WeakMethod(watch), name

    def __call__(self, module: nn.Module, call: AttentionCall) -> None:
        watch = self.watch()
        if watch is not None:
            watch(self.name, call)

    def __reduce__(self) -> tuple[object, ...]:
        return _Passing, ()


class _Passing:
    def __call__(self, module: nn.Module, call: AttentionCall) -> None:
        """Leave the call alone."""


class _Slot:
    """Replacement of a module's `forward` as long as there is a handler; the newest handles first."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.before = module.__dict__.get(FORWARD)
        self.handlers: list[Handler] = []
        self.__signature__ = inspect.signature(module.forward)

    @torch.compiler.disable  # the compiler misses some kernels under a function mode, which would bypass the slot
    def __call__(self, *args: object, **kwargs: object) -> Any:
        calls: list[str] = []
        with ExitStack() as modes:
            for handler in self.handlers:
                modes.enter_context(Interception(_handing(self.module, handler, calls)))
            own = self.before or type(self.module).forward.__get__(self.module)
            output = own(*args, **kwargs)
        if len(calls) < len(self.handlers):
            remedy = "load the model with attn_implementation='sdpa', or call it with need_weights=False"
            raise refusal("attention through scaled_dot_product_attention", f"another way in {self.name}", remedy)
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "__signature__"}


def _handing(module: nn.Module, handler: Handler, calls: list[str]) -> Callable[[AttentionCall], Tensor | None]:
    def handle(call: AttentionCall) -> Tensor | None:
        if call.unreadable is not None:
            raise call.unreadable
        if call.through != SDPA and not isinstance(handler, Watcher | _Passing):
            return None  # the output of such a kernel cannot be replaced; the module is then refused
        calls.append(call.through)
        return handler(module, call)

    return handle


def _attach(module: nn.Module, name: str, handler: Handler) -> Callable[[], None]:
    """Put the handler into the module's slot, made if there is none; returns what takes it out again."""
    slot = module.__dict__.get(FORWARD)
    if not isinstance(slot, _Slot):
        slot = _Slot(module, name)
        module.__dict__[FORWARD] = slot
    slot.handlers.append(handler)
    # A module with a hook is not bypassed by the fused encoder layer of torch.
    hook = module.register_forward_pre_hook(_nothing)

    def remove() -> None:
        hook.remove()
        slot.handlers.remove(handler)
        if not slot.handlers and module.__dict__.get(FORWARD) is slot:
            if slot.before is None:
                del module.__dict__[FORWARD]
            else:
                module.__dict__[FORWARD] = slot.before

    return remove


def _nothing(module: nn.Module, args: object) -> None:
    """Only there to be a hook."""
