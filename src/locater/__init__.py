"""See, predict and control where attention looks, from the eigenspectrum of each head's query-key matrix."""

from importlib import import_module
from typing import Any

# Looked up when first used: the command line must not load torch to print its help.
_HOMES = {
    "AttentionMonitor": "monitor",
    "Head": "heads",
    "LocAteR": "stabilisers",
    "Projection": "projections",
    "Scan": "scanning.scan",
    "compare": "scanning.compare",
    "predict": "prediction.predict",
    "scan": "scanning.scan",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'locater' has no attribute {name!r}")
    found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
