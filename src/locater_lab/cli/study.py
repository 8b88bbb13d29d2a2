"""`locater study`: a question of the paper's readers, measured, drawn and answered; resumes where it was stopped."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from locater.budget import limited
from locater.cli.output import FittedTable, console_for, table
from locater.cli.results import Engine, HtmlPath, Jobs, JsonPath, Retry, Timeout, save_result
from locater.errors import BadArguments, net
from locater.records import Json

from .sweep import measure_all

if TYPE_CHECKING:
    from ..studies.real_data import Reading
    from ..studies.sweep.folder import Sweep

Measure = Callable[["Sweep"], None]
REAL_DATA = "What do the columns of a scan say of attention measured on text? (with --model, docs/evidence.md)"


def study(
    name: Annotated[str | None, typer.Argument(help="Name of a study; without it, list them all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid: under two minutes on two cores.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the rows (default: studies/NAME).")] = None,
    jobs: Jobs = 1,
    on: Engine = None,
    model: Annotated[list[str] | None, typer.Option(help="For real-data: a model; may be repeated.")] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="For real-data: the text to measure on.")] = None,
    by_line: Annotated[bool, typer.Option("--by-line", help="For real-data: every line is a text of its own.")] = False,
    window: Annotated[int, typer.Option(help="For real-data: tokens in a window.")] = 256,
    timeout: Timeout = None,
    retry: Retry = False,
    json: JsonPath = None,
    html: HtmlPath = None,
) -> None:
    """Answer one of the open questions about localisation: a grid, its rows, a figure, and sentences made from them."""
    from ..studies.study import default_folder
    from ..studies.sweep import on_ray

    console = console_for(json)
    if name is None:
        console.print(_questions())
        return
    if name == "real-data":
        from ..studies.real_data import Reading

        folder, reading = out or default_folder(name, quick=False), Reading(text, by_line=by_line, window=window)
        with limited(seconds=timeout):
            _real_data(console, folder, model or [], reading, json=json)
        return
    on_ray.check_cluster(on)
    measure = partial(measure_all, jobs=jobs, retry=retry, on=on)
    found = _measured(console, name, out, quick=quick, measure=measure)
    save_result(found, json=json, html=html)


def _questions() -> FittedTable:
    from ..studies.study import STUDIES, find_study

    rows = [[name, number, find_study(name).question] for name, number in STUDIES.items()]
    rows.insert(list(STUDIES).index("mechanism") + 1, ["real-data", "Q2", REAL_DATA])
    return table(["study", "", "question"], rows, words=["study", "", "question"])


def _measured(console: Console, name: str, out: Path | None, *, quick: bool, measure: Measure) -> Json:
    """Every point of a study, then its answer, shown and saved."""
    from ..studies.study import default_folder, document, kind_of, points_of
    from ..studies.sweep.folder import create

    points = points_of(name, quick=quick)
    sweep = create(out or default_folder(name, quick=quick), kind_of(name), points)
    measure(sweep)
    found = document(name, sweep.rows(), num_points=len(points))
    _show(console, found, sweep.folder)
    _save(found, sweep.folder)
    return found


def _real_data(console: Console, folder: Path, models: list[str], reading: "Reading", *, json: Path | None) -> None:
    """The tables of docs/evidence.md for the user's own models, and for those that the folder has rows of already."""
    from locater.records import write_json

    from ..studies.real_data import evidence, kept_rows, real_data_page

    for number, one in enumerate(models):
        Console(stderr=True).print(f"[dim]{number + 1} of {len(models)}: {escape(one)}[/dim]", soft_wrap=True)
        with net(one):
            evidence(one, folder, reading)
    rows = kept_rows(folder)
    if not rows:
        raise BadArguments("real-data needs models: --model PATH, as often as there are")
    console.print(real_data_page(rows), soft_wrap=True, markup=False, highlight=False)
    if json:
        write_json({"schema": "locater.evidence/2", "models": rows}, json)


def _show(console: Console, found: Json, folder: Path) -> None:
    console.print(f"[bold]{escape(found['question'])}[/bold]")
    for sentence in found["answer"]:
        console.print(f"· {escape(sentence)}")
    if found["floors"]:
        console.print(f"[dim]Floors: {escape('; '.join(found['floors']))}.[/dim]")
    if found["setting"]:
        console.print(f"[dim]Setting: {escape(found['setting'])}.[/dim]")
    for row in found["failures"][:3]:
        console.print(f"[red]![/red] {escape(str(row['point'].get('name', row['point'])))}: {escape(row['error'])}")
    if len(found["failures"]) > 3:
        console.print(f"[red]![/red] and {len(found['failures']) - 3} more that failed; --retry measures them again")
    console.print(f"[dim]{len(found['rows'])} rows in {escape(str(folder))}[/dim]", soft_wrap=True)


def _save(found: Json, folder: Path) -> None:
    """`study.json`, and the figure where matplotlib is installed."""
    from locater.errors import Refusal
    from locater.records import write_json
    from locater.report import figures
    from locater.report.curves import study_figure

    write_json(found, folder / "study.json")
    if found["rows"]:
        with suppress(Refusal):  # without matplotlib the rows and the sentences are there all the same
            figures.save(study_figure(found), folder / "figure.png")
