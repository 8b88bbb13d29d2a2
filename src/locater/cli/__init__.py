"""The command line. `app` and `main` are imported on demand: verbs of other packages import modules from here."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("app", "main"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import program

    return getattr(program, name)
