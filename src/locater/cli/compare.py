"""`locater compare`: which heads moved between checkpoints, or along a run."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from ..behaviour import head_name
from ..errors import counted
from ..scanning import DEFAULT_LENGTH
from .output import FittedTable, console_for, load, parse_spans
from .output import table as fitted
from .results import (
    AllowPickle,
    HtmlPath,
    JsonPath,
    Layers,
    Layout,
    Length,
    Raw,
    TablePath,
    Timeout,
    raise_refused,
    save_result,
)

if TYPE_CHECKING:
    from ..scanning.compare import Comparison


def compare(
    sources: Annotated[list[str], typer.Argument(help="Checkpoints in order, or a run's folder with several.")],
    most: Annotated[int, typer.Option(help="Number of heads to show, those that moved most.")] = 12,
    layers: Layers = None,
    length: Length = DEFAULT_LENGTH,
    raw: Raw = False,
    layout: Layout = None,
    allow_pickle: AllowPickle = False,
    timeout: Timeout = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of checkpoints to scan at once.")] = 1,
    json: JsonPath = None,
    table: TablePath = None,
    html: HtmlPath = None,
) -> None:
    """Compare checkpoints: how fine-tuning, or a training run, changed each head's spectrum."""
    load("scanning.compare")
    from ..models.sources import Stored
    from ..report.terminal import HeatMap
    from ..scanning import compare as library

    stored = [Stored(source, layout=layout, allow_pickle=allow_pickle) for source in sources]
    chosen, console = parse_spans(layers, "--layers"), console_for(json)
    with console.status("scanning …"):
        found = library.compare(stored, layers=chosen, length=length, raw=raw, jobs=jobs, timeout=timeout)
    console.print(_heading(found))
    console.print()
    console.print(_table(found, most))
    console.print(HeatMap.of(found.to_json(), "moved"))
    save_result(
        found.to_json(), json=json, html=html, table=table, rows=(movement.to_record() for movement in found.heads)
    )
    raise_refused(found.refused)


def _heading(found: "Comparison") -> str:
    names = found.names
    shown = " → ".join(names if len(names) <= 4 else [names[0], names[1], "…", names[-1]])
    still = sum(movement.moved < 1e-6 for movement in found.heads)
    changed = sum(len({row.regime for row in movement.rows}) > 1 for movement in found.heads)
    lost = f", [red]{len(found.refused)} not read[/red]" if found.refused else ""
    return (
        f"[bold]{escape(shown)}[/bold]\n"
        f"{counted(len(found.heads), 'head')}, {still} unmoved, {changed} changed their regime{lost}; "
        "moved = |Δ(tr W, η)|/η"
    )


def _table(found: "Comparison", most: int) -> FittedTable:
    body = []
    for movement in found.most_moved(most):
        first, last = movement.rows[0], movement.rows[-1]
        regime = first.regime if first.regime == last.regime else f"{first.regime} → {last.regime}"
        body.append(
            [
                head_name(*first.place),
                f"{movement.moved:.3g}",
                f"{first.xi:.2f} → {last.xi:.2f}",
                f"{first.eta / first.temperature:.2g} → {last.eta / last.temperature:.2g}",
                f"{first.localisation:.2f} → {last.localisation:.2f}",
                regime,
            ]
        )
    return fitted(["head", "moved", "ξ", "η/λ", "localisation", "regime"], body, words=["head", "regime"])
