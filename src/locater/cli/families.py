"""`locater families`: every model type of the installed transformers, and how it is known."""

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ..errors import BadArguments, shown
from .output import console_for, table
from .results import JsonPath, MarkdownPath, save_result

if TYPE_CHECKING:
    from ..models.proof.survey import SurveyEntry


def families(
    types: Annotated[list[str] | None, typer.Argument(help="Only these model types.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Prove again the types that no table names (slow).")] = False,
    json: JsonPath = None,
    markdown: MarkdownPath = None,
) -> None:
    """List the model types that are read: by a table row, by proof on a tiny twin, or refused and why."""
    from ..models.proof import version
    from ..models.proof.survey import count_kinds
    from ..records import write

    console = console_for(json)
    entries = _surveyed(types, update=update)
    numbers = count_kinds(entries)
    headings, rows = ["model type", "known by", "row or reason"], []
    for entry in entries:
        how = f"{known_by(entry)} ({entry.listed})" if entry.listed else known_by(entry)
        rows.append([escape(entry.model_type), how, escape(words(entry))])
    console.print(table(headings, rows, words=headings))
    console.print()
    console.print(f"{summary(numbers)}, with transformers {version()}")
    if listed := [entry.listed for entry in entries if entry.listed]:
        known = f"{len(listed)} of them were tried with transformers {listed[0]}, by the table of this package."
        console.print(f"{known} A scan tries its own model's type; --update tries all.")
    found = {"transformers": version(), "counts": numbers, "families": [entry.to_json() for entry in entries]}
    save_result({"schema": "locater.families/1", **found}, json=json)
    if markdown:
        text = as_markdown(entries, numbers, version())
        write(markdown, lambda path: path.write_text(text, encoding="utf-8"))


def _surveyed(types: list[str] | None, *, update: bool) -> "list[SurveyEntry]":
    from ..models.proof.survey import model_types, survey

    wanted = types or model_types()
    for unknown in sorted({*wanted} - {*model_types()}):
        near = get_close_matches(unknown, model_types(), n=1)
        meant = f"did you mean {near[0]}?" if near else "`locater families` lists them"
        raise BadArguments(f"no model type is called {shown(unknown)!r}: {meant}")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (console.is_terminal and update)) as bar:
        task = bar.add_task("proving", total=len(wanted))
        found = []
        for entry in survey(wanted, update=update, tell=lambda name: bar.update(task, description=f"proving {name}")):
            found.append(entry)
            bar.advance(task)
        return found


def summary(numbers: dict[str, int]) -> str:
    read = (
        f"{numbers['table'] + numbers['proven']} types read ({numbers['table']} by table, {numbers['proven']} by proof)"
    )
    media = f"{numbers['with images or sound']} of the proven take images or sound"
    return f"{read}, {numbers['refused']} refused, {numbers['untried']} not tried; {media}"


def known_by(entry: "SurveyEntry") -> str:
    return entry.how if entry.error is None else f"proven ({entry.error:.0e})"


def words(entry: "SurveyEntry") -> str:
    """The row, and what it leaves out; or the reason."""
    left_out = f"; PARTIAL: {', '.join(entry.notes)} left out" if entry.notes else ""
    return entry.reason or entry.row + left_out


def as_markdown(entries: "list[SurveyEntry]", numbers: dict[str, int], transformers: str) -> str:
    lines = [
        "# Model types and how they are known",
        "",
        f"Made by `locater families --update --markdown docs/families_table.md` with transformers {transformers}: "
        f"{summary(numbers)}.",
        "",
        "| model type | known by | inputs | row, what it leaves out, or the reason |",
        "|---|---|---|---|",
    ]
    for entry in entries:
        cells = entry.model_type, known_by(entry), ", ".join(entry.inputs), words(entry).replace("|", "/")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
