"""What the commands share: where results go, and how they look in a terminal."""

from collections.abc import Collection, Iterable, Sequence
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


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str] = (), title: str | None = None
) -> Table:
    """Numbers to the right and never broken; the columns in `words` to the left, folded where the terminal is narrow."""
    drawn = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for heading in headings:
        is_words = heading in words
        drawn.add_column(heading, justify="left" if is_words else "right", no_wrap=not is_words, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn
