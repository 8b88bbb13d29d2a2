"""Documents on disk: written whole or not at all, read with one meaning only, and refused in a sentence.

Knows no torch, so that commands which only read are quick.
"""

import glob
import json
import os
import re
import reprlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .budget import budget
from .errors import DEBUG, Refusal, failed, import_extra, refusal, within

if TYPE_CHECKING:
    import pandas

STANDARD_OUTPUT = Path("-")

# A JSON object as `json.loads` gives it: a config, a result, a row. Its values are checked where they are read, hence
# `Any`. The second is for documents that are only read.
Json = dict[str, Any]
JsonMapping = Mapping[str, Any]
# What `state_dict` gives and `torch.save` keeps, typed as torch types its own.
State = dict[str, Any]
DEEPEST = 64  # tables and lists of YAML within each other
Constant = Callable[[str], Any] | None  # what NaN, Infinity and -Infinity stand for


def cache_folder() -> Path:
    """$LOCATER_CACHE, or the user's cache."""
    if chosen := os.environ.get("LOCATER_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "locater"


def write_json(document: JsonMapping, path: Path) -> None:
    """The document at `path`, or on standard output for `-`."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write a neighbouring file of the same suffix, then rename it: readers see the old or the new whole.

    A link stays, and what it points to is replaced; a file keeps its mode. What is no regular file (a device, a pipe)
    is written into and never replaced.
    """
    if path.is_dir():
        raise refusal("a file to write", f"the directory {path}", "name a file in it")
    try:
        path = path.resolve() if path.is_symlink() else path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            with tempfile.TemporaryDirectory() as folder:
                aside = Path(folder) / f"result{path.suffix}"
                save(aside)
                path.write_bytes(aside.read_bytes())
            return
        _sweep(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path), suffix=path.suffix)
    except (OSError, RuntimeError) as reason:
        raise failed(f"write {path}", _cause(reason), "choose another path") from None
    os.close(handle)
    temporary = Path(name)
    try:
        save(temporary)
        # mkstemp makes files private; a result is as readable as the one before, or as any file the user writes.
        temporary.chmod(path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask())
        temporary.replace(path)
    except OSError as reason:
        raise failed(f"write {path}", _cause(reason), "free some room or choose another path") from None
    finally:
        temporary.unlink(missing_ok=True)


def _cause(reason: Exception) -> object:
    return getattr(reason, "strerror", None) or reason


def _prefix(path: Path) -> str:
    """Prefix of an unfinished file; it names the process, so that a later one knows whether it is still written."""
    return f".{path.stem}.{os.getpid()}-"


def _sweep(path: Path) -> None:
    """Remove what a process that was killed left of this file."""
    left = re.compile(rf"\.{re.escape(path.stem)}\.(\d+)-\w+{re.escape(path.suffix)}")
    for other in path.parent.glob(f".{glob.escape(path.stem)}.*{glob.escape(path.suffix)}"):
        if (found := left.fullmatch(other.name)) and not _is_alive(int(found[1])):
            other.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def data_frame(rows: Sequence[JsonMapping]) -> "pandas.DataFrame":
    """Rows as a pandas DataFrame."""
    return import_extra("pandas", "pandas, for data frames", extra="report").DataFrame(rows)


def write_csv(rows: Sequence[JsonMapping], path: Path) -> None:
    """A table as CSV, with a heading; lists are written as JSON."""
    import csv

    names = dict.fromkeys(name for row in rows for name in row)  # what is there on request may be in some rows only

    def save(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(names))
            writer.writeheader()
            for row in rows:
                writer.writerow({k: json.dumps(v) if isinstance(v, list | tuple) else v for k, v in row.items()})

    write(path, save)


def write_parquet(rows: Sequence[JsonMapping], path: Path) -> None:
    """A table as Parquet; needs pyarrow."""
    arrow = import_extra("pyarrow", "pyarrow, for Parquet", extra="report")
    parquet = import_extra("pyarrow.parquet", "pyarrow, for Parquet", extra="report")
    columns = arrow.Table.from_pylist([dict(row) for row in rows])
    write(path, lambda temporary: parquet.write_table(columns, temporary))


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


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
    """The JSON object in a file; a file that is missing, too large or holds anything else is refused under its name."""
    with within(str(path)):
        return check_object(parse_json(_read(path, most="result bytes"), constant=constant))


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


def layer_key(layer: int, *, block: str = "") -> str:
    """The name of a layer in logs: `layer_03`; `encoder/layer_03` in a model with several kinds of attention.

    >>> layer_key(3), layer_key(3, block="encoder")
    ('layer_03', 'encoder/layer_03')
    """
    return f"{block}/layer_{layer:02d}" if block else f"layer_{layer:02d}"


def head_key(head: int) -> str:
    """The name of a head below its layer's: `head_05`."""
    return f"head_{head:02d}"
