"""`locater runs`: training runs side by side, arms over seeds."""

from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from locater.cli.output import console_for, parse_spans, table
from locater.cli.results import HtmlPath, JsonPath, PlotPath, save_result
from locater.errors import shown
from locater.records import Json, as_written

NAME_WIDTH = 24
MOST_NAMED = 6
ABSENT = "–"

Arm = Json


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder of the runs; those named ARM-seedN are the seeds of one arm.")],
    step: Annotated[
        int | None, typer.Option(help="Compare at this step; by default the last one that all reached.")
    ] = None,
    arms: Annotated[str | None, typer.Option(metavar="ARM,ARM", help="Only these arms.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0-2,7", help="Only runs with these seeds.")] = None,
    against: Annotated[str | None, typer.Option(metavar="ARM", help="Add differences to this arm, by seed.")] = None,
    plot: PlotPath = None,
    json: JsonPath = None,
    html: HtmlPath = None,
) -> None:
    """Compare runs of `locater train`: perplexity, entropy and spectrum of each arm over its seeds."""
    from ..studies.runs import compare_runs

    console = console_for(json)
    some = arms.split(",") if arms else None
    with as_written(folder):
        document = compare_runs(folder, step=step, arms=some, seeds=parse_spans(seeds, "--seeds"), against=against)
        _print(console, document, chosen=step is not None)
        save_result(document, json=json, html=html, plot=plot)


def _print(console: Console, document: Json, *, chosen: bool) -> None:
    from ..studies.runs import QUANTITIES

    arms, score = document["arms"], QUANTITIES[document["score"]].heading
    columns = _columns(document)
    num_runs = sum(len(arm["seeds"]) for arm in arms)
    why = "" if chosen else ", the last that all reached"
    console.print(f"{num_runs} runs in {len(arms)} arms at step [bold]{document['step']}[/bold]{why}; best first")
    console.print()
    console.print(table(list(columns), zip(*columns.values(), strict=True), words=["arm", "course"]))
    console.print()
    console.print(f"[dim]{score}: mean over seeds ± standard error, course its validations; other columns: means[/dim]")
    if document["against"] is not None:
        console.print(f"[dim]difference: {score} − that of {escape(document['against'])}, paired by seed[/dim]")
    _print_heads(console, arms)
    for sentence in _warnings(document):
        console.print(f"[red]![/red] {escape(sentence)}")


def _print_heads(console: Console, arms: list[Arm]) -> None:
    """The best arm's heads and the worst's, as maps on one scale, where there is more than one head."""
    from locater.report.terminal import HeatMap

    known = [arm for arm in arms if arm.get("heads")]
    chosen = known[:1] + known[1:][-1:]
    values = [head["normalised_entropy"] for arm in chosen for head in arm["heads"]]
    for arm in chosen:
        span = (min(values), max(values))
        console.print(HeatMap.of_heads(arm["heads"], "normalised_entropy", whose=shown(arm["arm"]), span=span))


def _columns(document: Json) -> dict[str, list[str]]:
    """All headings with their cells; what no arm has is left out."""
    from locater.report.terminal import sparkline

    from ..studies.runs import QUANTITIES, SCORES

    arms, score = document["arms"], document["score"]
    # The best stands first: a loss, or the perplexity of letters, needs more decimals than that of words.
    places = 4 if arms[0]["quantities"].get(score, {"mean": 0})["mean"] < 10 else 2

    def cells(show: Callable[[Any], str], name: str, group: str = "quantities") -> list[str]:
        return [show(arm[group][name]) if name in arm.get(group, {}) else ABSENT for arm in arms]

    columns = {
        "arm": ["\n".join(escape(part) for part in wrap(arm["arm"], NAME_WIDTH)) for arm in arms],
        "seeds": [str(len(arm["seeds"])) for arm in arms],
        QUANTITIES[score].heading: cells(lambda found: _with_error(found, f"z.{places}f"), score),
        "course": cells(lambda curve: sparkline(curve["mean"]), score, "curves"),
    }
    if document["against"] is not None:
        columns["difference"] = cells(lambda found: _with_error(found, f"+z.{places}f"), score, "differences")
    for name, quantity in QUANTITIES.items():
        if name not in SCORES and any(name in arm["quantities"] for arm in arms):
            columns[quantity.heading] = cells(
                lambda found, to=quantity.places: _number(found["mean"], f"z.{to}f"), name
            )
    return columns


def _warnings(document: Json) -> list[str]:
    """List runs that the means leave out, and seeds that lack a partner."""
    found = []

    def reached(step: int | None) -> str:
        return "no validation yet" if step is None else f"reached {step}"

    if left_out := document["left_out"]:
        named = ", ".join(f"{one['run']} ({reached(one['last_step'])})" for one in left_out[:MOST_NAMED])
        more = ", …" if len(left_out) > MOST_NAMED else ""
        found.append(f"left out {len(left_out)} without step {document['step']}: {named}{more}")
    for arm in (arm for arm in document["arms"] if "differences" in arm):
        pairs = len(arm["differences"].get(document["score"], {"seeds": ()})["seeds"])
        if pairs < len(arm["seeds"]):
            found.append(f"{arm['arm']}: only {pairs} of {len(arm['seeds'])} seeds have a partner")
    seeds = [set(arm["seeds"]) for arm in document["arms"]]
    if any(one != seeds[0] for one in seeds):
        shared = ",".join(map(str, sorted(set.intersection(*seeds))))
        remedy = f": --seeds {shared} compares them on what all have" if shared else ", and share none"
        found.append(f"arms have different seeds{remedy}")
    return found


def _with_error(found: Json, form: str) -> str:
    error = found["standard_error"]
    return _number(found["mean"], form) + ("" if error is None else f" ± {_number(error, form.lstrip('+'))}")


def _number(value: float, form: str) -> str:
    """Fixed decimals, but a run that diverged does not make its column endless."""
    return format(value, form if abs(value) < 1e6 else ".2e")
