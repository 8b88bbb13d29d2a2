"""Documents on disk (JSON, its lines, YAML) and the names in them: one meaning only, refused in a sentence.

Knows no torch, so that commands which only read are quick.
"""

import json
import os
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .budget import budget
from .errors import DEBUG, Refusal, refusal, within
from .records import Json

DEEPEST = 64  # tables and lists of YAML within each other
Constant = Callable[[str], Any] | None  # what NaN, Infinity and -Infinity stand for


def parse_json(data: bytes | bytearray, *, constant: Constant = None) -> Any:
    """The value that `data` holds; refuses what is no JSON, or has a key twice.

    NaN and infinity are not JSON: refused, unless `constant` says what they stand for.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=constant or _refuse_constant
        )
    except Refusal:
        raise
    except UnicodeDecodeError:
        raise refusal("valid JSON", "bytes that are no text") from None
    except (ValueError, RecursionError) as reason:
        words = f"{reason!s:.80}".splitlines()[:1] or [type(reason).__name__]
        raise refusal("valid JSON", words[0], "it is damaged or not yet written whole") from None


def check_object(value: object) -> Json:
    """The value, if it is a JSON object."""
    if not isinstance(value, dict):
        raise refusal("a JSON object", f"a {type(value).__name__}", "restore the file")
    return value


def read_json(path: Path, *, constant: Constant = None) -> Json:
    """The JSON object in a file; a file that is missing or holds anything else is refused under its name."""
    with within(str(path)):
        return check_object(parse_json(_read(path), constant=constant))


def read_lines(path: Path, *, constant: Constant = None) -> list[Json]:
    """The JSON objects of all whole lines; what a killed process left of a last one is dropped."""
    found = []
    for number, line in enumerate(_read(path).split(b"\n")[:-1], 1):
        if line.strip():
            with within(f"{path}: line {number}"):
                found.append(check_object(parse_json(line, constant=constant)))
    return found


def read_yaml(path: Path) -> Any:
    """The value in a YAML file of bounded size; an alias is refused, since a few of them can stand for gigabytes."""
    import yaml

    text, depth = _read(path, most="layout bytes"), 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise refusal("every value written out", "an alias (*)", "repeat what it stands for")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:  # the time of its reader grows with the square of the depth
                raise refusal(f"at most {DEEPEST} tables and lists within each other", "more", "restore the file")
        return yaml.safe_load(text)
    except Refusal:
        raise
    except (ValueError, RecursionError, yaml.YAMLError) as reason:
        raise refusal("a readable YAML file", " ".join(str(reason).split())[:200]) from None


def _read(path: Path, *, most: str = "") -> bytes:
    """The bytes of a regular file: a pipe may never say anything, a device never end."""
    try:
        if path.exists() and not path.is_file():
            raise refusal(f"a file {path.name}", "a directory" if path.is_dir() else "a pipe or device")
        if most:
            budget().check(most, path.stat().st_size)
        return path.read_bytes()
    except (OSError, ValueError) as reason:
        if isinstance(reason, Refusal):
            raise
        raise refusal(f"a file {path.name}", getattr(reason, "strerror", None) or reason) from None


@contextmanager
def as_written(source: object) -> Iterator[None]:
    """Around the use of documents that were read: a value of the wrong kind is theirs, and said in a sentence."""
    try:
        yield
    except Refusal:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as reason:
        if os.environ.get(DEBUG):
            raise
        got = f"{type(reason).__name__} ({reason!s:.100})"
        raise refusal(f"values in {source} as locater writes them", got, "write it again with this version") from None


def check_beside(name: Any, document: object) -> str:
    """A name that a document gives, if it stays in the document's own folder: no document leads elsewhere.

    >>> check_beside("parts/model-1.safetensors", "index.json")
    'parts/model-1.safetensors'
    >>> check_beside("../model.safetensors", "index.json")
    Traceback (most recent call last):
    locater.errors.Refusal: expected names of files next to index.json, got '../model.safetensors'; do not use it
    """
    # A backslash, a colon or a percent sign is part of a path elsewhere: on Windows, in an address.
    fine = isinstance(name, str) and name.isprintable() and name[:1] != "~" and not set(name) & set("\\:%")
    if not fine or any(not part.strip(". ") or len(part.encode()) > 255 for part in name.split("/")):
        raise refusal(f"names of files next to {document}", reprlib.repr(name), "do not use it")
    return name


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise refusal("each key once", f"{twice!r:.80} twice")
    return result
