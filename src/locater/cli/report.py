"""`locater report`: one self-contained page from results or models."""

import os
import re
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..budget import limited
from ..documents import as_written
from ..errors import BadArguments, net, refusal, shown
from ..records import Json
from .options import PagePath, Timeout
from .output import console_for, example

SWEEP_LIST = "sweep.json"


def report(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="What commands wrote (JSON, JSONL, the folder of a run, of runs or of a sweep), or models; "
            "else a small example."
        ),
    ] = None,
    out: PagePath = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Its title.")] = None,
    timeout: Timeout = None,
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also every map and curve as PNG and SVG in this folder.")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(metavar="L.H,…", help="With --figures: these heads too, such as 5.6,9.1, or all. [the one shown]"),
    ] = None,
) -> None:
    """One HTML file that shows every head: no network, opens from disk, can be sent to anybody."""
    wanted, sources = parse_heads(heads), sources or [example()]
    with limited(seconds=timeout):
        documents = [read(source) for source in sources]
    times = [Path(source).stat().st_mtime for source in sources if Path(source).exists()]
    with as_written(", ".join(sources)):
        if figures:
            from ..report.head_figures import first_shown, save_all

            save_all(documents, figures, heads=first_shown(documents) if wanted == [] else wanted)
        save_html(documents, out, title=title, when=max(times, default=None))


def parse_heads(text: str | None) -> list[tuple[int, int]] | None:
    """Layers and numbers of heads; None stands for all, an empty list for none.

    >>> parse_heads("5.6, 9.1")
    [(5, 6), (9, 1)]
    """
    if text is None:
        return []
    if text == "all":
        return None
    found = [re.fullmatch(r"\s*(\d+)\.(\d+)\s*", part) for part in text.split(",")]
    if None in found:
        raise BadArguments(f"--heads expects layers and numbers such as 5.6,9.1, or all, got {text!r}")
    return [(int(one[1]), int(one[2])) for one in found if one]


def read(source: str) -> Json:
    """The document of one source: read where a command wrote it, else made by scanning."""
    with net(source):
        return _read(source)


def _read(source: str) -> Json:
    from ..report.reading import METRICS, SWEEP, is_record, read_record

    path = Path(source)
    if path.is_dir() and (path / SWEEP_LIST).is_file():
        return _of_sweep(path)
    if path.is_dir() and not is_record(path) and any((entry / METRICS).is_file() for entry in path.iterdir()):
        from ..studies.runs import compare_runs

        return compare_runs(path)
    if is_record(path):
        document = read_record(path)
        return _of_rows(document) if document["schema"] == SWEEP else document
    if path.suffix == ".html":
        raise refusal("results or a model", source, "the page itself goes after -o")
    from .scan import scan_with_progress

    return scan_with_progress(source, {"eigenvalues": True, "curves": True}).to_json()


def _of_sweep(folder: Path) -> Json:
    """A sweep's own folder, finished or not."""
    from ..report.reading import check
    from ..studies.sweep.shown import sweep_document

    return check(sweep_document(folder))


def _of_rows(document: Json) -> Json:
    """What `sweep --json` wrote."""
    from ..studies.sweep.shown import rows_document

    return rows_document(document["rows"], document["folder"])


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
