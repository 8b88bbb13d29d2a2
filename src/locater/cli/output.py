"""Output that the commands share: destinations of results, and tables in a terminal."""

import codecs
import errno
import gc
import io
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..errors import BadArguments, failed
from ..packages import EXAMPLE
from ..records import STANDARD_OUTPUT

LONGEST_SPAN = 100_000  # larger is certainly a typo, and would fill the memory
FOLDED_WIDTH = 24  # a last column of words is folded down to this before anything is left out

# What an old terminal's encoding may lack, in letters that every one has.
PLAIN = {
    **{"ξ": "xi", "η": "eta", "λ": "lambda", "ρ": "rho", "σ": "sigma", "θ": "theta", "ω": "omega", "κ": "kappa"},
    **{"Δ": "delta", "Γ": "Gamma", "Σ": "Sigma", "τ": "tau", "μ": "mu", "…": "...", "–": "-", "—": "-", "−": "-"},
    **{"²": "^2", "√": "sqrt ", "‖": "|", "×": "x", "±": "+-", "≤": "<=", "≥": ">=", "→": "->", "·": "*", "∞": "inf"},
    **{
        "↓": "down",
        "₁": "1",
        "ᵀ": "^T",
        "▁": "_",
        "▂": ".",
        "▃": "-",
        "▄": "=",
        "▅": "=",
        "▆": "#",
        "▇": "#",
        "█": "#",
        "▀": "#",
    },
    **{"┤": "|", "│": "|", "└": "+", "─": "-", "↑": "^", "←": "<-", "“": '"', "”": '"'},
    **{
        **{"₀": "0", "₂": "2", "³": "^3", "⁴": "^4", "½": "1/2", "≈": "~", "∝": "~", "∂": "d", "∇": "grad "},
        **{"α": "alpha", "γ": "gamma", "ε": "epsilon", "π": "pi", "φ": "phi", "χ": "chi", "Φ": "Phi"},
    },
}


def _spell_plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter, "?") for letter in lost), error.end


codecs.register_error("locater.plain", _spell_plainly)


def speak_plainly() -> None:
    """Let both streams write what their encoding lacks (cp1252, ASCII) in plain letters, and never fail on it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="locater.plain")


def load(module: str) -> None:
    """Import a module of the library, and torch with it, without a search for garbage among their 300,000 objects.

    Python would search all of them several times on the way: a tenth of a second each.
    """
    if f"locater.{module}" in sys.modules:
        return
    gc.disable()
    try:
        import_module(f"locater.{module}")
    finally:
        gc.freeze()  # they stay
        gc.enable()


@contextmanager
def writing() -> Iterator[None]:
    """Say in a sentence that standard output cannot take more (a full disk), now and not when Python exits."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as reason:
        if reason.errno == errno.EPIPE:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        if reason.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise failed("write to standard output", reason.strerror, "free some room") from None


class Speaker(Console):
    """Ignore EPIPE when the reader leaves (`| head`), so that the files asked for are still written."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # What is still buffered would fail once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def console_for(json: Path | None, *, aside: bool = False) -> Console:
    """Choose stdout or stderr: standard error when standard output carries JSON, or for remarks next to the results."""
    return Speaker(stderr=aside or json == STANDARD_OUTPUT, highlight=False)


def aside(sentence: str) -> None:
    """Print a remark on standard error, brackets and all."""
    Console(stderr=True, highlight=False).print(sentence, markup=False)


def example() -> str:
    """The model to show where none was named."""
    aside("no model was named, so this is a small one that comes with locater: name a folder, a file or a hub id")
    return EXAMPLE


@dataclass(frozen=True)
class FittedTable:
    """A table that gives up whole columns where the terminal is too narrow, and says which; no number is ever cut."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str]
    spare: Sequence[str]
    title: str | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        spoken = self.in_letters_of(console.encoding)
        kept = spoken.fitting(options.max_width)
        yield spoken.as_table(kept)
        if lost := [heading for heading in spoken.headings if heading not in kept]:
            yield Text(f"in a wider terminal and in --json: {', '.join(lost)}", style="dim")

    def in_letters_of(self, encoding: str) -> "FittedTable":
        """The same in letters that the terminal has, before widths are counted: λ may become six of them."""

        def spoken(texts: Iterable[str]) -> list[str]:
            return [text.encode(encoding, "locater.plain").decode(encoding) for text in texts]

        rows = [spoken(row) for row in self.rows]
        return FittedTable(spoken(self.headings), rows, spoken(self.words), spoken(self.spare), self.title)

    def fitting(self, width: int) -> list[str]:
        """The columns that fit: those in `spare` go first, then the rightmost; the first one always stays."""
        kept = list(self.headings)
        for heading in [*self.spare, *reversed(self.headings[1:])]:
            if self.width(kept) <= width:
                break
            if heading in kept:
                kept.remove(heading)
        return kept

    def width(self, kept: Sequence[str]) -> int:
        """Width of the columns and the two spaces between them; the last one folds where it holds words."""
        by_name = {
            heading: max(cell_len(line) for cell in (heading, *cells) for line in cell.split("\n"))
            for heading, *cells in zip(self.headings, *self.rows, strict=True)
        }
        if self.headings[-1] in self.words:
            by_name[self.headings[-1]] = min(by_name[self.headings[-1]], FOLDED_WIDTH)
        return sum(by_name[heading] for heading in kept) + 2 * (len(kept) - 1)

    def as_table(self, kept: Sequence[str]) -> Table:
        """Build rich's table of these columns."""
        # Without lines: every column of the terminal counts.
        table = Table(box=None, title=self.title, title_justify="left", title_style="bold", pad_edge=False)
        table.padding = (0, 2, 0, 0)
        for heading in kept:
            justify = "left" if heading in self.words else "right"
            table.add_column(heading, justify=justify, no_wrap=heading != self.headings[-1], overflow="fold")
        for row in self.rows:
            table.add_row(*(cell for heading, cell in zip(self.headings, row, strict=True) if heading in kept))
        return table


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[str] = (),
    spare: Sequence[str] = (),
    title: str | None = None,
) -> FittedTable:
    """Numbers to the right and never broken; the columns in `words` to the left; the last one folds if it is words.

    Where the terminal is too narrow the columns in `spare` are given up first.
    """
    return FittedTable(list(headings), [list(row) for row in rows], words, spare, title)


def print_bullet(console: Console, mark: str, sentence: str) -> None:
    """A sentence behind a mark of one letter; where it is folded, its further lines stay behind the mark."""
    for line in Text.from_markup(sentence).wrap(console, console.width - 2):
        line.rstrip()
        console.print(Text.from_markup(mark) + " " + line)
        mark = " "


def parse_spans(text: str | None, option: str) -> list[int] | None:
    """All numbers that are named; None where the option was not given.

    >>> parse_spans("0-2,7", "--layers")
    [0, 1, 2, 7]
    """
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(LONGEST_SPAN):
            raise BadArguments(f"{option} expects numbers and spans such as 0-5,11, got {text!r}")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found
