"""Parts that commands share: options, progress on standard error, results written where they were asked for, pages."""

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ..errors import Refusal, shown
from ..records import STANDARD_OUTPUT, Json
from .output import aside, console_for

BETWEEN_LINES = 10.0  # seconds: what is done sooner needs no line
Tell = Callable[[int, int], None]  # steps done, and in all


def _announce_folder(context: typer.Context, path: Path | None) -> Path | None:
    """Tell at the end which folder was made for a result: a typo makes one, too."""
    if path is not None and path != STANDARD_OUTPUT and not path.parent.exists():
        context.call_on_close(lambda: path.parent.exists() and aside(f"made the folder {shown(path.parent)}"))
    return path


def _file(*names: str, metavar: str = "PATH", help: str) -> Any:
    """Declare an option that names a file to write."""
    return typer.Option(*names, metavar=metavar, help=help, callback=_announce_folder)


JsonPath = Annotated[Path | None, _file("--json", help="Write JSON to this file (- for standard output).")]
HtmlPath = Annotated[Path | None, _file("--html", help="Write a page for the browser to this file.")]
TablePath = Annotated[Path | None, _file("--table", metavar="FILE", help="Write a row per head (.csv or .parquet).")]
MarkdownPath = Annotated[Path | None, _file("--markdown", help="Write the table as Markdown to this file.")]
PlotPath = Annotated[Path | None, _file("--plot", metavar="FILE", help="Draw a picture (.png, .svg or .pdf).")]
PagePath = Annotated[Path, _file("-o", "--out", metavar="PAGE.html", help="File of the page.")]

Timeout = Annotated[float | None, typer.Option(metavar="SECONDS", help="Give up on remote files after this time.")]
Length = Annotated[int, typer.Option(help="T, the context length in the theory.")]
Layers = Annotated[str | None, typer.Option(metavar="0-5,11", help="Only these layers.")]
Raw = Annotated[bool, typer.Option("--raw", help="Leave the gain of the input norm out of the weights.")]
Layout = Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Describe a model of no known family.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load pickles that run code: only if you trust them.")
]
Heads = Annotated[bool, typer.Option("--heads", help="A line for every head.")]
Jobs = Annotated[int, typer.Option(min=1, help="Processes, one thread each.")]
Engine = Annotated[
    str | None, typer.Option(metavar="ray[://HOST:PORT]", help="On Ray: of this machine, or a cluster's head.")
]
Retry = Annotated[bool, typer.Option("--retry", help="Measure again what failed before.")]


@contextmanager
def progress(task: str, *, long: bool = False) -> Iterator[Tell]:
    """Gives a function to be told of steps; a task that is `long` says that it begins."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(shown(task), long=long)
        return
    with Progress(console=console, transient=True) as bar:
        number = bar.add_task(escape(shown(task)), total=None)
        yield lambda done, total: bar.update(number, completed=done, total=total)


def _lines(task: str, *, long: bool) -> Tell:
    if long:
        aside(f"{task} …")
    last = monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if done < total and monotonic() - last >= BETWEEN_LINES:
            aside(f"{task}: step {done} of {total}")
            last = monotonic()

    return tell


def raise_refused(sentences: Sequence[str]) -> None:
    """Refuse with the first sentence and the number of the others, where anything was not read."""
    if sentences:
        first, *others = sentences
        raise Refusal(first + (f" (and {len(others)} more)" if others else ""))


def save_result(
    document: Json,
    *,
    json: Path | None = None,
    html: Path | None = None,
    plot: Path | None = None,
    table: Path | None = None,
    rows: Iterable[Json] = (),
) -> None:
    """Write a result where it was asked for: the document, its page, its picture, its rows as CSV or Parquet."""
    from ..records import write_csv, write_json, write_parquet

    if plot:
        from ..report import figures
        from ..report.curves import draw_result

        figures.save(draw_result(document), plot)
        console_for(json).print(f"picture: {escape(str(plot))}", soft_wrap=True)
    if json:
        write_json(document, json)
    if table:
        (write_parquet if table.suffix == ".parquet" else write_csv)(list(rows), table)
    if html:
        save_html([document], html)


def save_html(
    documents: list[Json],
    path: Path,
    *,
    title: str | None = None,
    when: float | None = None,
    note: str | None = None,
) -> None:
    """Write the page and say where; `when` is the date of what it shows, by default now; `note` is the sender's."""
    from ..report.page import save_page

    save_page(documents, path, title=title, facts=facts_of(when), note=note)
    console_for(None, aside=True).print(f"page: {escape(str(path))}", soft_wrap=True)


def facts_of(when: float | None) -> dict[str, str]:
    """Command, versions and date; SOURCE_DATE_EPOCH stands for now where builds must repeat."""
    moment = float(os.environ.get("SOURCE_DATE_EPOCH") or (datetime.now(UTC).timestamp() if when is None else when))
    date = datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = shown(shlex.join(["locater", *sys.argv[1:]]))
    versions = ", ".join(f"{name} {_version(name)}" for name in ("locater", "torch"))
    facts = {"command": command, "versions": f"{versions}, Python {sys.version.split()[0]}"}
    return facts | {"date of the results": date} | _address()


def _address() -> dict[str, str]:
    """Say where this package is published, by its metadata; nothing before it is."""
    with suppress(PackageNotFoundError):
        named = dict(url.split(", ") for url in metadata("locater").get_all("Project-URL") or ())
        if (address := named.get("Repository")) and "/OWNER/" not in address:
            return {"locater is at": address}
    return {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
