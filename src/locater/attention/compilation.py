"""Compiled models: run as written while they are watched, and recognised where that cannot be."""

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

WRAPPER, FLEX = "compile_wrapper", "_flex_attention_hop_wrapper"  # torch's names of what surrounds compiled code
INFERENCE = ("_forward_metadata_inference", "_shape_inference")  # of torch.distributed.pipelining, by version
NUM_OUTPUTS = 3  # of FlexAttention's operator: output, log-sum-exp, largest scores
NUM_ARGUMENTS = 7  # of FlexAttention's operator as it is compiled; behind them stand what its functions close over


class Eagerly:
    """While it is entered, what torch has compiled runs as it was written: compiled code bypasses an interception.

    torch's stance is one for the process, so entries are counted: the first sets it, the last puts it back. Other
    threads lose only speed. Inside a compiled region, where a stance comes too late, a mode of this thread keeps the
    frames that follow from being compiled. What was compiled before stays, and is used again afterwards.
    """

    lock, number, stance = threading.Lock(), 0, None

    def __init__(self, *, within_compiled: bool = False) -> None:
        self.mode = _Uncompiled() if within_compiled else None

    def __enter__(self) -> "Eagerly":
        with Eagerly.lock:
            Eagerly.stance = Eagerly.stance or torch.compiler.set_stance("force_eager")
            Eagerly.number += 1
        if self.mode is not None:
            self.mode.__enter__()
        return self

    def __exit__(self, *reason: object) -> None:
        if self.mode is not None:
            self.mode.__exit__(None, None, None)
        with Eagerly.lock:
            Eagerly.number -= 1
            if Eagerly.number == 0 and Eagerly.stance is not None:
                Eagerly.stance.__exit__(None, None, None)
                Eagerly.stance = None


class _Uncompiled(TorchDispatchMode):
    """Changes nothing; torch compiles no frame under a mode of this kind."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def run_compiled(kernel: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call FlexAttention's operator by the compiler of the code around it; as written where none is, or it fails.

    As written, it holds every pair of queries and keys.
    """
    context: Any = next((one for one in contexts() if callable(one)), None)
    if context is None or any(args[NUM_ARGUMENTS:]):
        return kernel(*args, **kwargs)

    wanted = _wanted_outputs()

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)[:wanted]

    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.compiler.set_stance("default"):
            outputs = context(call)(*args[:NUM_ARGUMENTS], **kwargs)
    except Exception:  # whatever the compiler says, to be watched must not end a run
        return kernel(*args, **kwargs)
    return (*outputs, *(outputs[0].new_empty(0) for _ in range(NUM_OUTPUTS - wanted)))


def _wanted_outputs() -> int:
    """Count the outputs of FlexAttention's operator that its caller asked for: all, or the one there is on a CPU."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "flex_attention":
        frame = frame.f_back
    more = frame is None or frame.f_locals.get("return_lse") or frame.f_locals.get("return_aux")
    return NUM_OUTPUTS if more else 1


def contexts() -> Iterator[Any]:
    """Yield the compilers whose code this thread is in, the innermost first, without FlexAttention's own."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == WRAPPER and getattr(frame.f_locals.get("fn"), "__name__", "") != FLEX:
            yield frame.f_locals.get("self")
        frame = frame.f_back


def in_compiled() -> bool:
    """Tell whether a function that `torch.compile` made is among this thread's callers."""
    return any(True for _ in contexts())


def in_shape_inference() -> bool:
    """Tell whether a pipeline asks a stage for the shapes of its output, by a pass over memory that holds no data."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in INFERENCE and "pipelining" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def in_transform() -> bool:
    """Tell whether a transformation of torch.func is under way, beneath which tensors have no numbers to be read."""
    return peek_interpreter_stack() is not None


def is_full_graph(module: nn.Module) -> bool:
    """Tell whether a module itself was compiled with fullgraph=True, by `torch.compile` or in place."""
    context = getattr(module, "dynamo_ctx", None) if "_orig_mod" in module._modules else None
    wrapper = getattr(module, "_compiled_call_impl", None)
    if context is None and wrapper is not None and getattr(wrapper, "__closure__", None):
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True))
        context = cells["self"].cell_contents if "self" in cells else None
    return bool(getattr(context, "fullgraph", False))
