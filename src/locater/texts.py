"""Real English on every machine: docstrings and help topics of the running Python's own library.

Files are parsed, never imported; the order is that of their paths, so one Python gives one text.
"""

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .errors import missing

TOPICS = "pydoc_data/topics.py"
# Installed packages are not the library, and its tests' docstrings are mostly test cases.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SHORTEST = 80  # characters of a docstring that is more than a label


@cache
def embedded_text() -> str:
    """All passages, an empty line between them: about two million characters, in a few seconds."""
    # Some literals hold halves of characters, which no tokenizer takes.
    text = "\n\n".join(passages()).encode("utf-8", "ignore").decode("utf-8")
    if not text:
        place = sysconfig.get_path("stdlib")
        raise missing(f"docstrings in the sources of Python's library in {place}", "name a text with --text")
    return text


def passages(library: Path | None = None) -> Iterator[str]:
    """The docstrings of every file, in the order of paths and lines, each once; a help topic counts as one."""
    library = library or Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).as_posix()):
        name = path.relative_to(library)
        if LEFT_OUT.intersection(name.parts):
            continue
        for passage in _strings(path) if name.as_posix() == TOPICS else _docstrings(path):
            if len(passage) >= SHORTEST and passage not in seen:
                seen.add(passage)
                yield passage


def _docstrings(path: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(_parse(path)) if isinstance(node, documented)]
    for node in sorted(found, key=lambda node: getattr(node, "lineno", 0)):
        yield (ast.get_docstring(node) or "").strip()


def _strings(path: Path) -> Iterator[str]:
    """The values of the one dictionary that the file of help topics consists of."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Dict):
            constants = (value.value for value in node.values if isinstance(value, ast.Constant))
            yield from (value.strip() for value in constants if isinstance(value, str))


def _parse(path: Path) -> ast.Module:
    """The file's tree; an empty one for files that are deliberately broken."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in string literals
        try:
            return ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            return ast.Module([], [])
