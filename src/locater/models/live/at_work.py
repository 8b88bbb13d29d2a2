"""Which stabilisers are at work on a model, so that nobody advises what is there; nothing is kept alive by it."""

from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from .tensors import unwrap

_KNOWN: "WeakKeyDictionary[nn.Module, WeakSet]" = WeakKeyDictionary()


def begin(model: nn.Module, stabiliser: object) -> None:
    _KNOWN.setdefault(unwrap(model), WeakSet()).add(stabiliser)


def end(stabiliser: object) -> None:
    for known in _KNOWN.values():
        known.discard(stabiliser)


def names(model: nn.Module) -> set[str]:
    """Their classes' names."""
    return {type(one).__name__ for one in _KNOWN.get(unwrap(model), ())}
