"""The first call of a model, before it runs: its arguments are a sample, to find heads and to try things on."""

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .watch import Sample


class FirstCall:
    """Gives the arguments of the model's next call to `use`, once, before the call itself runs.

    What `use` runs of the model is over before the call begins, for other wrappers' hooks too.
    """

    def __init__(self, entry: nn.Module, use: Callable[[Sample], None]) -> None:
        self.use: Callable[[Sample], None] | None = use
        hook: Any = _Hook(weakref.ref(self))
        self.handle = entry.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def come(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        use = self.use
        self.close()
        if use is not None:
            use(as_sample(module, args, kwargs))

    def close(self) -> None:
        self.use = None
        self.handle.remove()


class _Hook:
    """Does not keep the one that waits alive; in a copy of the model it does nothing."""

    def __init__(self, reference: "weakref.ref[FirstCall] | None" = None) -> None:
        self.reference = reference

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        waiting = None if self.reference is None else self.reference()
        if waiting is not None:
            waiting.come(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def as_sample(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> Sample:
    """A call's arguments by name, as far as the signature names them."""
    if not kwargs:
        return args
    parameters = inspect.signature(module.forward).parameters.values()
    names = [one.name for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs}
