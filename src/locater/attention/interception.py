"""The one interception of attention kernels: of the call, and not of the module or the process."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ..errors import Refusal, refusal
from .arguments import is_share_of_tokens
from .calls import SDPA, AttentionCall, attend
from .capture import Follow
from .compilation import run_compiled
from .kernels import read_call
from .registered import KERNELS, Functions, Kernel, check_output

REPLACEABLE = (functional.scaled_dot_product_attention, attend)  # others order heads otherwise, or give several tensors
Handler = Callable[[AttentionCall], Tensor | None]


class Interception(TorchFunctionMode):
    """While it is entered, every attention of this thread goes to the handler: None lets it be, a tensor replaces it.

    Nothing outside the calls is touched, so there is nothing to put back. The handler runs outside of the mode. With
    `written_out` it is handed softmax over a last dimension too, which it must tell apart by module and shape.
    `follow` is told of every operation: function, arguments, output.
    """

    def __init__(self, handle: Handler, *, written_out: bool = False, follow: Follow | None = None) -> None:
        super().__init__()
        self.handle, self.written_out, self.follow = handle, written_out, follow
        self.functions, self.num_handed = Functions(), 0

    def __enter__(self) -> "Interception":
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        self.functions.__exit__(*reason)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        kernel = KERNELS.get(func)
        if kernel is not None and kernel.is_last_resort:
            return self._last_resort(kernel, func, args, kwargs)
        output = self._hand_over(func, args, kwargs)
        if self.follow is not None:
            self.follow(func, args, kwargs, output)
        return output

    def _hand_over(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            call = read_call(func, args, kwargs, written_out=self.written_out)
        except Refusal as reason:  # for the handler to judge: to look on must not end a run
            nothing = torch.empty(0)
            name = str(getattr(func, "_qualified_op_name", getattr(func, "__name__", "a kernel")))
            call = AttentionCall(nothing, nothing, nothing, through=name, unreadable=reason)
        if call is None:
            return func(*args, **kwargs)
        self.num_handed += 1
        if is_share_of_tokens(call.query):
            share = f"a share of their tokens in a call of {call.through} (context parallelism)"
            call = call.changed(unreadable=refusal("whole texts on each process", share), is_share=True)
        known = call.logits is None and call.unreadable is None
        modules, x, lengths = callers(call.query if known else None)
        output = self.handle(replace(call, modules=modules, x=x, lengths=lengths))
        if output is not None and func not in REPLACEABLE:
            raise refusal(f"{SDPA}, whose output can be replaced", f"a call of {call.through}", f"call {SDPA}")
        if output is None:
            is_flex = func is torch.ops.higher_order.flex_attention and not _others()
            output = run_compiled(func, args, kwargs) if is_flex else func(*args, **kwargs)
        return output

    def _last_resort(self, kernel: Kernel, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A function that may call a kernel inside: only if none was seen there, by its arguments and its output."""
        before = self.num_handed
        with self:
            output = func.__wrapped__(*args, **kwargs)
        if self.num_handed == before:
            try:
                call = check_output(replace(kernel.call(args, kwargs), through=kernel.name), output)
            except Exception as reason:  # whatever it is, to be watched must not end a run
                nothing, reason = torch.empty(0), reason if isinstance(reason, Refusal) else Refusal(str(reason))
                call = AttentionCall(nothing, nothing, nothing, through=kernel.name, unreadable=reason)
            modules, x, lengths = callers(None if call.unreadable else call.query)
            call = replace(call, modules=modules, x=x, lengths=lengths)
            with torch._C.DisableTorchFunction():
                for one in (self, *_others()):
                    if one.handle(call) is not None:
                        found = f"a call of {call.through}"
                        raise refusal(f"{SDPA}, whose output can be replaced", found, f"call {SDPA}")
        return output

    def _multi_head(self, *args: object, **kwargs: object) -> Any:
        """torch's function in a copy that does not ask modes to run it: this one sees what it does inside."""
        original = functional.multi_head_attention_forward
        names = {**original.__globals__, "has_torch_function": lambda tensors: False}
        copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
        copy.__kwdefaults__ = original.__kwdefaults__
        with self:
            return copy(*args, **kwargs)


def _others() -> list[Interception]:
    """List the interceptions further out, which wait for the call that this one has seen."""
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Interception)]


def callers(query: Tensor | None = None) -> tuple[tuple[nn.Module, ...], Tensor | None, tuple[int, ...]]:
    """The modules whose methods are running in this thread, the innermost first, and what their attention is given:
    its input, and the lengths of all sequences that come with it.

    Read from the stack of calls, so that no module needs a hook for it. The input is that of the innermost forward with
    one of (texts, tokens, width), as the method calls it now; None where there is none. What is of the query's own
    shape may be the query, handed to a module around the kernel: it is taken for the input if two modules have such.
    """
    found: list[nn.Module] = []
    inputs: list[tuple[Tensor, tuple[int, ...]]] = []
    last: nn.Module | None = None  # whose input was taken: of a forward that calls the class's above the inner one
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module):
            # A forward may call a method of its own, which is there already.
            names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
            given = [frame.f_locals.get(name) for name in names] if code.co_name == "forward" else []
            if given and owner is not last and _is_sequence(given[0]):
                lengths = (size for one in given if _is_sequence(one) for size in one.shape[:2])
                inputs.append((given[0], tuple(lengths)))
                last = owner
            if not (found and owner is found[-1]):
                found.append(owner)
        frame = frame.f_back
    others = [one for one in inputs if query is None or one[0].shape != query.shape]
    x, lengths = others[0] if others else inputs[0] if len(inputs) > 1 else (None, ())
    return tuple(found), x, lengths


def _is_sequence(given: object) -> TypeGuard[Tensor]:
    return isinstance(given, Tensor) and not given.is_nested and given.dim() == 3 and given.is_floating_point()
