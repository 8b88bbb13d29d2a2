"""See, predict and control where attention looks, from the eigenspectrum of each head's query-key matrix."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers; at run time `_HOMES` says the same, later
    from . import stabilisers, theory
    from .head import Head
    from .models.sources import Live, Stored
    from .monitor.monitor import AttentionMonitor
    from .prediction.predict import predict
    from .projections import Projection
    from .scanning.compare import compare
    from .scanning.scan import Scan, scan
    from .scanning.source import head_rows, heads
    from .stabilisers.locater import LocAteR

__version__ = "0.1.0"
__all__ = [
    "AttentionMonitor",
    "Head",
    "Live",
    "LocAteR",
    "Projection",
    "Scan",
    "Stored",
    "compare",
    "head_rows",
    "heads",
    "predict",
    "scan",
    "stabilisers",
    "theory",
]

# Looked up when first used: the command line must not load torch to print its help.
_HOMES = {
    "AttentionMonitor": "monitor.monitor",
    "Head": "head",
    "Live": "models.sources",
    "LocAteR": "stabilisers.locater",
    "Projection": "projections",
    "Scan": "scanning.scan",
    "Stored": "models.sources",
    "compare": "scanning.compare",
    "head_rows": "scanning.source",
    "heads": "scanning.source",
    "predict": "prediction.predict",
    "scan": "scanning.scan",
    "stabilisers": None,
    "theory": None,
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'locater' has no attribute {name!r}")
    home = _HOMES[name]
    thing = import_module(f".{name}", __name__) if home is None else getattr(import_module(f".{home}", __name__), name)
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
