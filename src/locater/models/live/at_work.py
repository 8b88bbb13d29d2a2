"""Registry of stabilisers attached to a model, so that no alarm suggests one that is there; it keeps nothing alive."""

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
