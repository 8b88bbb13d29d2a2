"""The command line: {verb: function}. Building it imports neither torch nor anything that does."""

import sys
from typing import Annotated

import typer

from .. import __version__
from ..errors import BadArguments, Refusal, net, shown
from .compare import compare
from .demo import demo
from .doctor import doctor
from .explore import explore
from .families import families
from .grouped_help import GroupedHelp, Help, Program
from .output import speak_plainly, writing
from .predict import predict
from .report import report
from .runs import runs
from .scan import scan
from .study import study
from .sweep import sweep
from .theory import theory
from .train import train

VERBS = {
    "scan": scan,
    "compare": compare,
    "predict": predict,
    "theory": theory,
    "train": train,
    "runs": runs,
    "sweep": sweep,
    "study": study,
    "report": report,
    "explore": explore,
    "demo": demo,
    "families": families,
    "doctor": doctor,
}

app = typer.Typer(
    name="locater",
    cls=Program,
    epilog="Completion in your shell: locater --install-completion (or --show-completion, to see it first).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb, function in VERBS.items():
    app.command(verb, cls=GroupedHelp if function is train else Help)(function)


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
