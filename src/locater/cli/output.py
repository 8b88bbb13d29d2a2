"""What the commands share: where results go, and how they look in a terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..records import STANDARD_OUTPUT

JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", help="Write JSON there (- = standard output).")
]


def console_for(json: Path | None) -> Console:
    """Where to talk: standard error when standard output carries JSON."""
    return Console(stderr=json == STANDARD_OUTPUT, highlight=False)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> Table:
    """Numbers to the right, words to the left, no lines that are not needed."""
    body = [list(row) for row in rows]
    drawn = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1))
    for index, heading in enumerate(headings):
        numeric = all(_is_number(row[index]) for row in body)
        drawn.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        drawn.add_row(*row)
    return drawn


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "0123456789.-−+" or cell in ("nan", "–")
