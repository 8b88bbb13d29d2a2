"""Scans with their progress, and tables of their rows, for the commands that make them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Refusal
from ..records import Json
from .progress import progress

if TYPE_CHECKING:
    from ..models.sources import Stored
    from ..scanning.scan import Scan


def raise_refused(sentences: Sequence[str]) -> None:
    """Exit 1 where something was not read, after all that was read has been shown."""
    if sentences:
        first, *others = sentences
        raise Refusal(first + (f" (and {len(others)} more)" if others else ""))


def scan_with_progress(source: "Stored", **options: Any) -> "Scan":
    from ..scanning.scan import scan as run

    with progress(f"scanning {source.place}", steps="layers") as tell:
        return run(source, progress=tell, **options)


def save_rows(document: Json, rows: Iterable[Json], *, json: Path | None, table: Path | None) -> None:
    """Write the document, and its rows as CSV or Parquet, by the name of the file."""
    from ..records import write_csv, write_json, write_parquet

    if json:
        write_json(document, json)
    if table:
        (write_parquet if table.suffix == ".parquet" else write_csv)(list(rows), table)
