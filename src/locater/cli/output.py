"""What the commands share: where results go, and how they look in a terminal."""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..records import STANDARD_OUTPUT

JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="PATH", help="Write JSON there (- = standard output).")
]


class Speaker(Console):
    """Falls silent when its reader leaves (`| head`), so that the files asked for are still written."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What is still buffered would fail once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def console_for(json: Path | None) -> Console:
    """Where to talk: standard error when standard output carries JSON."""
    return Speaker(stderr=json == STANDARD_OUTPUT, highlight=False)


def aside(sentence: str) -> None:
    """What a person should know beside the results: on standard error, brackets and all."""
    Console(stderr=True, highlight=False).print(sentence, markup=False)


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[str] = (), title: str | None = None
) -> Table:
    """Numbers to the right and never broken; the columns in `words` to the left; the last one folds."""
    # Without lines: every column of the terminal counts.
    drawn = Table(box=None, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        is_words = heading in words
        drawn.add_column(
            heading, justify="left" if is_words else "right", no_wrap=heading != headings[-1], overflow="fold"
        )
    for row in rows:
        drawn.add_row(*row)
    return drawn
