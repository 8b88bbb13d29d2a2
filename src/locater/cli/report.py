"""`locater report`: one self-contained page from results or models."""

import os
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..errors import refusal, shown
from ..records import Json
from .output import console_for

HtmlPath = Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write a page to look at there.")]


def report(
    sources: Annotated[
        list[str],
        typer.Argument(help="What commands wrote (JSON, JSONL, a run's folder, a folder of runs), or models."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="PAGE.html", help="Where the page goes.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(help="Its title.")] = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also every figure as PNG and SVG in this folder.")
    ] = None,
) -> None:
    """One HTML file that shows every head: no network, opens from disk, can be sent to anybody."""
    documents = [read(source) for source in sources]
    times = [Path(source).stat().st_mtime for source in sources if Path(source).exists()]
    save_html(documents, out, title=title, when=max(times, default=None))
    if figures:
        from ..report.head_figures import save_all

        save_all(documents, figures)


def read(source: str) -> Json:
    """The document of one source: read where a command wrote it, else made by scanning."""
    from ..report.reading import METRICS, is_record, read_record

    path = Path(source)
    if path.is_dir() and not is_record(path) and any((entry / METRICS).is_file() for entry in path.iterdir()):
        from ..studies.runs import compare_runs

        return compare_runs(path)
    if is_record(path):
        return read_record(path)
    if path.suffix == ".html":
        raise refusal("results or a model", source, "the page itself goes after -o")
    from .scan import scan_with_progress

    return scan_with_progress(source, {"eigenvalues": True, "curves": True}).to_json()


def save_html(documents: list[Json], path: Path, *, title: str | None = None, when: float | None = None) -> None:
    """Write the page and say where; `when` is the date of what it shows, by default now."""
    from ..report.page import save_page

    save_page(documents, path, title=title, facts=facts_of(when))
    console_for(None, aside=True).print(f"page: {escape(str(path))}", soft_wrap=True)


def facts_of(when: float | None) -> dict[str, str]:
    """Command, versions and date; SOURCE_DATE_EPOCH stands for now where builds must repeat."""
    moment = float(os.environ.get("SOURCE_DATE_EPOCH") or (datetime.now(UTC).timestamp() if when is None else when))
    date = datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = shown(shlex.join(["locater", *sys.argv[1:]]))
    versions = ", ".join(f"{name} {_version(name)}" for name in ("locater", "torch"))
    return {"command": command, "versions": f"{versions}, Python {sys.version.split()[0]}", "date of the results": date}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
