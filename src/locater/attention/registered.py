"""Kernels that someone told of, and Python functions that are kernels: those that no mode of torch can see."""

import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import refusal
from .calls import AttentionCall
from .flash import is_flash, read_flash

Reader = Callable[[dict[str, Any]], AttentionCall]
FORWARD = "_flash_attn_fwd"  # flash-attn 4's, in `flash_attn.cute.interface` or wherever `kernels` puts that


@dataclass(frozen=True)
class Kernel:
    """A function, the names of its arguments with their defaults, and how to read them."""

    name: str
    defaults: dict[str, Any]
    read: Reader

    def call(self, args: tuple, kwargs: dict[str, Any]) -> AttentionCall:
        return self.read(self.defaults | dict(zip(self.defaults, args, strict=False)) | kwargs)


KERNELS: dict[Any, Kernel] = {}


def register_kernel(kernel: Any, read: Reader) -> Any:
    """Teach the monitor and the stabilisers a kernel: `read` makes an `AttentionCall` of its arguments by name.

    For an operator (`torch.ops.mine.attention`) that is all. A Python function is seen when it is called through what
    is returned here, `attention = register_kernel(attention, read)`. Queries, keys and values of an `AttentionCall` are
    (texts, heads, tokens, size); set `tokens_first` where the output has heads behind tokens.
    """
    kernel = getattr(kernel, "_opoverload", kernel)  # of what `torch.library.custom_op` gives
    kernel = getattr(kernel, "overloadpacket", kernel)
    schema = getattr(getattr(kernel, "default", kernel), "_schema", None)
    if schema is not None:
        defaults = {one.name: one.default_value if one.has_default_value() else None for one in schema.arguments}
        KERNELS[kernel] = Kernel(schema.name, defaults, read)
        return kernel
    if not inspect.isfunction(kernel):
        raise refusal("an operator of torch.ops or a Python function", f"{type(kernel).__name__}")
    visible = _visible(kernel)
    KERNELS[visible] = Kernel(kernel.__qualname__, _defaults(kernel), read)
    return visible


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: None if one.default is inspect.Parameter.empty else one.default for one in parameters}


def _visible(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, of which the modes of torch are told."""

    @wraps(function)
    def visible(*args: Any, **kwargs: Any) -> Any:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(visible, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    return visible


class Functions:
    """While it is entered, flash-attn 4's forward functions are visible, in every module that has one.

    Entries are counted: the first puts wrappers in their places, the last takes them out.
    """

    lock, number = threading.Lock(), 0
    replaced: list[tuple[dict[str, Any], Callable[..., Any]]] = []

    def __enter__(self) -> "Functions":
        with Functions.lock:
            Functions.number += 1
            if Functions.number == 1:
                for module in [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]:
                    self._replace(vars(module))
        return self

    def _replace(self, names: dict[str, Any]) -> None:
        function = names.get(FORWARD)
        if not inspect.isfunction(function) or not is_flash(FORWARD, defaults := _defaults(function)):
            return
        names[FORWARD] = visible = _visible(function)
        KERNELS[visible] = Kernel(FORWARD, defaults, lambda given: read_flash(given, defaults, "flash_attn"))
        Functions.replaced.append((names, function))

    def __exit__(self, *reason: object) -> None:
        with Functions.lock:
            Functions.number -= 1
            while Functions.number == 0 and Functions.replaced:
                names, function = Functions.replaced.pop()
                KERNELS.pop(names[FORWARD], None)
                names[FORWARD] = function
