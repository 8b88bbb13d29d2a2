"""The command line: verbs of the library and of entry points, each imported when it is called or helped with."""

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from .. import __version__
from ..errors import BadArguments, Refusal, net, shown
from ..packages import plugins
from .output import speak_plainly, writing

NARROW = 72


class Program(TyperGroup):
    """Help that names the options for completion in its last sentence: in the list, a narrow terminal cuts them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            if isinstance(option, TyperOption) and option.name in ("install_completion", "show_completion"):
                option.hidden = True
        super().format_help(ctx, formatter)


class Help(TyperCommand):
    """Frames round the options where there is room: in a narrow terminal they cut the names of options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if formatter.width < NARROW:
            self.rich_markup_mode = None
        for option in self.get_params(ctx):
            if isinstance(option, TyperOption) and option.is_flag:
                option.metavar = ""  # typer would write <bool>, as if the flag took a value
        super().format_help(ctx, formatter)


VERBS = ("scan", "compare", "predict", "report", "families", "doctor", "theory")  # each a module here
# What users do, in the order of the help; verbs of other packages come last.
PANELS = {
    "Look at a model": ("scan", "compare", "predict", "report"),
    "Find out what works here": ("families", "doctor"),
    "Understand the theory": ("theory", "explore"),
    "Laboratory": ("demo", "train", "runs", "sweep", "study"),
}
OTHERS = "Further commands"
HELP_NAMES: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


class Commands(Mapping[str, Any]):
    """Commands by their verbs, in the order of the help; a verb is imported when its command is asked for."""

    def __iter__(self) -> Iterator[str]:
        ranked = [verb for verbs in PANELS.values() for verb in verbs]
        known = {*VERBS, *plugins("verbs")}
        return iter([*(verb for verb in ranked if verb in known), *sorted(known - {*ranked})])

    def __len__(self) -> int:
        return sum(1 for _ in self)  # unpacking would ask for the length

    def __getitem__(self, verb: str) -> Any:
        if verb in VERBS:
            function = getattr(import_module(f"{__package__}.{verb}"), verb)
        else:
            function = plugins("verbs")[verb].load()
        panel = next((panel for panel, verbs in PANELS.items() if verb in verbs), OTHERS)
        single = typer.Typer(add_completion=False, rich_markup_mode="rich", context_settings=HELP_NAMES)
        single.command(verb, cls=Help, rich_help_panel=panel)(function)
        return typer.main.get_command(single)


class Verbs(Program):
    """The program; its commands are built on demand, so that `scan` does not import `train`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = cast("dict[str, Any]", Commands())


app = typer.Typer(
    name="locater",
    cls=Verbs,
    epilog="Completion in your shell: locater --install-completion (or --show-completion, to see it first).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=HELP_NAMES,
)


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
