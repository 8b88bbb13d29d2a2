"""Options that several commands have, each defined once."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import shown
from ..records import STANDARD_OUTPUT
from .output import aside


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
