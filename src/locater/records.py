"""Results on disk: whole files or none, JSON that any reader takes."""

import glob
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import failed, import_extra, refusal

if TYPE_CHECKING:
    import pandas

STANDARD_OUTPUT = Path("-")

# A JSON object as `json.loads` gives it: a config, a result, a row. Its values are checked where they are read, hence
# `Any`. The second is for documents that are only read.
Json = dict[str, Any]
JsonMapping = Mapping[str, Any]
# What `state_dict` gives and `torch.save` keeps, typed as torch types its own.
State = dict[str, Any]


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


def layer_key(layer: int, *, block: str = "") -> str:
    """The name of a layer in logs: `layer_03`; `encoder/layer_03` in a model with several kinds of attention.

    >>> layer_key(3), layer_key(3, block="encoder")
    ('layer_03', 'encoder/layer_03')
    """
    return f"{block}/layer_{layer:02d}" if block else f"layer_{layer:02d}"


def head_key(head: int) -> str:
    """The name of a head below its layer's: `head_05`."""
    return f"head_{head:02d}"
