"""Installed Python packages: weights that they bring, named `pip:PACKAGE`, and additions, found by their entry points.

Nothing of a package is imported to find either.
"""

import os
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from .errors import refusal

PREFIX = "pip:"
# A small language model that this package itself brings along.
EXAMPLE = PREFIX + "locater"
SUFFIXES = (".safetensors", ".gguf")

Named = TypeVar("Named")


def packaged(source: Named) -> Named | str:
    """The folder (or the GGUF file) of weights within the package that `pip:PACKAGE` names; all else as it was."""
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else ""
    if not isinstance(text, str) or not text.startswith(PREFIX):
        return source
    files = sorted(file for place in _places(text) for file in place.rglob("*") if file.suffix in SUFFIXES)
    folders = {file.parent for file in files}
    if len(files) == 1 and files[0].suffix == ".gguf":
        return str(files[0])
    if len(folders) != 1:
        got = f"them in {len(folders)} folders" if folders else "none"
        raise refusal(f"weights ({', '.join(SUFFIXES)}) in one folder of {text}", got, "name a file instead")
    return str(folders.pop())


def _places(text: str) -> list[Path]:
    """Locate a package: the name to install it by, with `-`, or the name to import it by."""
    name = text.removeprefix(PREFIX).replace("-", "_")
    spec = find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        install = f"pip install --no-deps {name.replace('_', '-')[:120]}"  # what else it wants is not needed to read it
        remedy = install if name.isidentifier() else "check the spelling"
        raise refusal("the name of an installed package", f"{name[:120]!r}, which is not installed", remedy)
    return [Path(place) for place in spec.submodule_search_locations]


def plugins(kind: str) -> dict[str, EntryPoint]:
    """The additions of one kind by their names, the laboratory's among them; nothing is imported before `load()`.

    The groups are `locater.verbs` (functions of the command line), `locater.loaders` (by model type: a module with
    `load_trained_model` and `load_trained_tokenizer`), `locater.folders` (folders of results as documents, None for any
    other folder) and `locater.documents` (by the name of a schema: a document as one that the page draws).
    """
    return {point.name: point for point in entry_points(group=f"locater.{kind}")}
