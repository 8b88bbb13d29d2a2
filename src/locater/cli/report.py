"""`locater report`: one self-contained page from results or models."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ..budget import limited
from ..errors import net, refusal
from ..packages import plugins
from ..records import Json, as_written
from .output import aside, console_for, example
from .results import PagePath, Timeout, progress, save_html


def report(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="Models, or results of commands (JSON, JSONL, the folder of a run, of runs or of a sweep); "
            "without any, a small example."
        ),
    ] = None,
    out: PagePath = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="Sentence for its top: why you send it.")] = None,
    timeout: Timeout = None,
) -> None:
    """Write one HTML page that shows every head: no network, opens from disk, can be sent to anybody."""
    sources = sources or [example()]
    with limited(seconds=timeout):
        documents = [read_source(source) for source in sources]
    times = [Path(source).stat().st_mtime for source in sources if Path(source).exists()]
    with as_written(", ".join(sources)):
        save_html(documents, out, title=title, when=max(times, default=None), note=note)
    if note is None:
        aside('to say at its top why you send it: --note "…"')
    for document in documents:
        for sentence in document.get("story", ()):
            console_for(None, aside=True).print(escape(sentence), soft_wrap=True)


def read_source(source: str) -> Json:
    """The document of one source: read where a command wrote it, else made by scanning."""
    with net(source):
        return _read(source)


def _read(source: str) -> Json:
    from ..report.reading import is_record, read_record

    path = Path(source)
    if path.is_dir():
        for reader in plugins("folders").values():
            if (document := reader.load()(path)) is not None:
                return document
    if is_record(path):
        document = read_record(path)
        reader = plugins("documents").get(document["schema"].removeprefix("locater.").partition("/")[0])
        return document if reader is None else reader.load()(document)
    if path.suffix == ".html":
        raise refusal("results or a model", source, "the page itself goes after -o")
    from ..models.sources import Stored
    from ..scanning.scan import scan

    with progress(f"scanning {source}") as tell:
        return scan(Stored(source), details=("eigenvalues", "curves"), progress=tell).to_json()
