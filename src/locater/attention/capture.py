"""Capture a module's inputs: the one hook, which stays with its module and leaves copies and saved files alone."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from ..errors import missing, refusal

Follow = Callable[[Any, tuple, dict[str, Any], Any], None]  # told of an operation: function, arguments, output


class Hook:
    """Calls a function with what the module's hook is given, for the module that it was made for and no other.

    A deep copy or a pickle of the module holds a function of Python's own in its place that does nothing, so a copy
    never feeds who watches the original, and a saved model loads where this package is not installed.
    """

    def __init__(self, module: nn.Module, function: Callable[..., None]) -> None:
        self.module, self.function = weakref.ref(module), function

    def __call__(self, module: nn.Module, *given: object) -> None:
        self.function(self.module, module, *given)

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (nullcontext(), "__exit__")


Take = Callable[[int, Tensor], None]


@contextmanager
def inputs_of(
    modules: Mapping[str, nn.Module], names: Sequence[str], take: Take | None = None
) -> Iterator[list[Tensor]]:
    """Yield the inputs of each named module, in that order, while the model runs inside.

    A name that stands several times (a module that layers share, as ALBERT's) is a call each, in their order.
    `take(number, x)` gets each input as it comes, and then none is kept.
    """
    waiting: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        waiting.setdefault(name, []).append(number)
    seen: dict[int, Tensor] = {}
    take = take or (lambda number, x: seen.__setitem__(number, x.detach()))
    kept: list[Tensor] = []
    with ExitStack() as stack:
        for name in waiting:
            if name not in modules:
                raise missing(f"a module {name} to listen to", "only models of modules can be run")
            hook = _receive(name, waiting[name], take)
            stack.callback(modules[name].register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield kept
    missed = [name for name, left in waiting.items() if left]
    if missed:
        raise missing(f"a call of the attention layer `{missed[0]}` in the forward pass")
    kept += [x for _, x in sorted(seen.items(), key=lambda item: item[0])]


def _receive(name: str, waiting: list[int], take: Take) -> Callable[..., None]:
    def receive(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        if not waiting:
            remedy = "name its projections, a layer for every call"
            raise refusal(f"one call of `{name}` for each of its layers", "more calls than layers", remedy)
        x = first_argument(args, kwargs)
        assert isinstance(x, Tensor)
        take(waiting.pop(0), x)

    return receive


def first_argument(args: tuple, kwargs: Mapping[str, object]) -> object:
    return args[0] if args else next(iter(kwargs.values()), None)
