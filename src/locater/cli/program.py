"""The command line: verbs of the library and of entry points; building it imports no torch."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import BadArguments, Refusal, net, shown
from ..plugins import plugins
from .compare import compare
from .doctor import doctor
from .families import families
from .help import Help, Program
from .output import speak_plainly, writing
from .predict import predict
from .report import report
from .scan import scan
from .theory import theory

VERBS: dict[str, Callable[..., Any]] = {
    "scan": scan,
    "compare": compare,
    "predict": predict,
    "report": report,
    "families": families,
    "doctor": doctor,
    "theory": theory,
}
# What users do, in the order of the help; verbs of other packages come last.
PANELS = {
    "Look at a model": ("scan", "compare", "predict", "report", "families"),
    "Guard training": ("doctor",),
    "Understand the theory": ("theory", "explore"),
    "Laboratory": ("demo", "train", "runs", "sweep", "study"),
}
OTHERS = "Further commands"

app = typer.Typer(
    name="locater",
    cls=Program,
    epilog="Completion in your shell: locater --install-completion (or --show-completion, to see it first).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add_verbs() -> None:
    verbs = VERBS | {name: point.load() for name, point in plugins("verbs").items() if name not in VERBS}
    panel_of = {verb: panel for panel, verbs in PANELS.items() for verb in verbs}
    for verb in [*(verb for verb in panel_of if verb in verbs), *(verb for verb in verbs if verb not in panel_of)]:
        function, panel = verbs[verb], panel_of.get(verb, OTHERS)
        app.command(verb, cls=Help, rich_help_panel=panel)(function)


_add_verbs()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"locater {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """See, predict and control where attention looks, from the eigenspectrum of each head's query-key matrix."""


def main() -> None:
    """Exit 0 when done, 1 when it could not (one sentence says why), 2 for bad arguments, 3 for a met `--fail-on`."""
    speak_plainly()
    try:
        with net(shown(" ".join(["locater", *sys.argv[1:]]), 200)), writing():
            app()
    except Refusal as reason:
        print("locater: " + "\n".join(shown(line, 4000) for line in str(reason).split("\n")), file=sys.stderr)
        sys.exit(2 if isinstance(reason, BadArguments) else 1)
