"""A slot in anyone's attention: every call of an attention kernel within a module goes to handlers.

The queries and keys seen there are the real ones, per head, norms and rotary positions included. A slot belongs to its
module: a copy of the module has a slot of its own, with handlers that know nothing of the original.
"""

import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...attention.calls import SDPA, AttentionCall
from ...attention.compilation import Eagerly, in_compiled, is_full_graph
from ...attention.interception import Interception
from ...attention.outside import in_full_graph
from ...errors import refusal
from .pairs import Pair

Handler = Callable[[nn.Module, AttentionCall], Tensor]  # what to give in place of the kernel's output
FORWARD = "forward"
WAY_OUT = "load the model with attn_implementation='sdpa', or call it with need_weights=False"
ALONE = "put each into a module, or take LocAteR, which looks at no call"
BREAK = "compile without fullgraph=True: each attention module is then one graph break"


@runtime_checkable
class Visit(Protocol):
    """One run of a module: told of every call in it, and of its end."""

    written_out: bool

    def __call__(self, call: AttentionCall) -> Tensor | None: ...
    def end(self) -> None: ...


@runtime_checkable
class Looking(Protocol):
    """A handler that replaces nothing; `visit` gives None for a run that it does not look at."""

    def visit(self) -> Visit | None: ...


class Slots:
    """One handler in every attention module of the pairs; `remove()` leaves no trace, in any order, as often as called.

    A handler must be picklable: it goes with a copy of the model, so it either holds no state of the original, or is
    one of `looking`.
    """

    def __init__(self, pairs: Iterable[Pair], handler: Callable[[str], Handler | Looking]) -> None:
        self.removals = [_attach(module, name, handler(name)) for module, name in modules_of(pairs).items()]

    def remove(self) -> None:
        while self.removals:
            self.removals.pop()()


def modules_of(pairs: Iterable[Pair]) -> dict[nn.Module, str]:
    """Name each attention module by its pairs; refuse one that computes pairs of two names."""
    named: dict[nn.Module, str] = {}
    for pair in pairs:
        if type(pair.query.weight.attention).forward is nn.Module.forward:  # of a list of layers, say
            raise refusal(f"a module around {pair.name} that is called", "one without a forward", ALONE)
        first = named.setdefault(pair.query.weight.attention, pair.name)
        if first != pair.name:
            both = f"one that computes {first} and {pair.name}"
            raise refusal("a module of its own for each attention", both, ALONE)
    return named


class _Slot:
    """Replacement of a module's `forward` as long as there is a handler; the newest handles first."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.before: Any = module.__dict__.get(FORWARD)
        self.handlers: list[Handler | Looking] = []
        self.__signature__ = inspect.signature(module.forward)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling() and in_full_graph():
            if any(not hasattr(handler, "visit") for handler in self.handlers):
                _refuse_full_graph()
            return self._forward(*args, **kwargs)  # without a look: the stabiliser notices that it saw nothing
        return self._outside(*args, **kwargs)  # type: ignore[arg-type]

    @torch.compiler.disable  # the compiler misses some kernels under a function mode, which would bypass the slot
    def _outside(self, *args: object, **kwargs: object) -> Any:
        visits = [visit for handler in self.handlers if (visit := self._visit(handler)) is not None]
        with ExitStack() as modes:
            if visits:
                modes.enter_context(Eagerly(within_compiled=in_compiled()))
            for visit in visits:
                modes.enter_context(Interception(visit, written_out=visit.written_out))
            output = self._forward(*args, **kwargs)
        for visit in visits:
            visit.end()
        return output

    def _visit(self, handler: Any) -> Visit | None:
        return handler.visit() if hasattr(handler, "visit") else _Replacing(self.module, self.name, handler)

    def _forward(self, *args: object, **kwargs: object) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """Return what it stands before, for those who look through wrappers."""
        return self.before or MethodType(type(self.module).forward, self.module)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "__signature__"}


def check_no_full_graph(model: nn.Module) -> None:
    """For handlers that replace outputs, before anything is changed."""
    if any(is_full_graph(module) for module in model.modules()):
        _refuse_full_graph()


@torch.compiler.assume_constant_result
def _refuse_full_graph() -> None:
    """Called also while a full graph is made, before anything has run."""
    raise refusal("a model whose compiled graph may be left within its attention", "fullgraph=True", BREAK)


class _Replacing:
    """A run of a module whose calls are computed by a handler; refused where the output cannot be replaced."""

    written_out = False

    def __init__(self, module: nn.Module, name: str, handler: Handler) -> None:
        self.module, self.name, self.handler, self.number, self.others = module, name, handler, 0, set[str]()

    def __call__(self, call: AttentionCall) -> Tensor | None:
        if call.unreadable is not None:
            raise call.unreadable
        if call.through != SDPA:
            self.others.add(call.through)
            return None  # the output of such a kernel cannot be replaced; the module is then refused
        self.number += 1
        return self.handler(self.module, call)

    def end(self) -> None:
        if not self.number:
            way, remedy = f"{', '.join(sorted(self.others)) or 'another way'} in {self.name}", WAY_OUT
            if self.others and not hasattr(self.module, "config"):  # a model of one's own has no such options
                remedy = "take QKClip, which acts after any kernel that can be read"
            raise refusal("attention through scaled_dot_product_attention", way, remedy)


def _attach(module: nn.Module, name: str, handler: Handler | Looking) -> Callable[[], None]:
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
