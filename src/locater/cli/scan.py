"""`locater scan`: every head's query-key spectrum, straight from the files."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..behaviour import RANDOM_WEIGHTS, describe_theory, head_name
from ..errors import BadArguments, counted, shown
from ..quantities import REGIME_WORDS, quantity
from ..scanning import DEFAULT_LENGTH
from .output import FittedTable, console_for, example, load, parse_spans, print_bullet
from .output import table as fitted
from .results import (
    AllowPickle,
    Heads,
    HtmlPath,
    JsonPath,
    Layers,
    Layout,
    Length,
    TablePath,
    Timeout,
    progress,
    raise_refused,
    save_result,
)

if TYPE_CHECKING:
    from ..scanning.rows import Condition, HeadRow
    from ..scanning.scan import Detail, Scan

FAIL_ON_MET = 3
MOST_FAILURES = 5
COLUMNS = ("estimated_near_mass", "trace_over_temperature", "eta_over_temperature", "xi", "localisation")
SPARE = ("trace_over_temperature", "localisation")  # the first to go where a screen is narrow
RANGE = "ξ range"
KEY = "near?: estimated share on the 16 nearest tokens; local: share the theory drops"
MEASURE = "What heads do on text, measured: locater predict MODEL"
MEDIANS = "medians of each layer's heads, and how many heads have each regime"

Source = Annotated[
    str | None,
    typer.Argument(
        help="A directory, a file, a Hugging Face id, an address, or pip:PACKAGE; without it, a small example.",
        show_default=False,
    ),
]
Spectrum = Annotated[
    str,
    typer.Option(
        metavar="NAME,…",
        help="Any of raw (leave the gain of the input norm out), eigenvalues (adds `spread`, and all of them to JSON).",
    ),
]
FailOn = Annotated[
    str | None, typer.Option(metavar="'xi<0.5 …'", help="Exit 3 if a head meets one of these conditions.")
]


def scan(
    source: Source = None,
    heads: Heads = False,
    layers: Layers = None,
    length: Length = DEFAULT_LENGTH,
    spectrum: Spectrum = "",
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="A LoRA adapter on top of the source.")] = None,
    layout: Layout = None,
    allow_pickle: AllowPickle = False,
    timeout: Timeout = None,
    fail_on: FailOn = None,
    json: JsonPath = None,
    html: HtmlPath = None,
    table: TablePath = None,
) -> None:
    """Show every head's query-key spectrum, the theory's word for it and where it probably looks: weights alone."""
    load("scanning.scan")
    from ..models.sources import Stored
    from ..scanning.rows import parse_conditions
    from ..scanning.scan import scan as run

    console = console_for(json)
    stored = Stored(source or example(), adapter, layout, allow_pickle, timeout)
    conditions = [] if fail_on is None else parse_conditions(fail_on)
    asked = {name for name in spectrum.split(",") if name}
    if unknown := asked - {"raw", "eigenvalues"}:
        raise BadArguments(f"--spectrum expects raw or eigenvalues, got {min(unknown)!r}")
    details: set[Detail] = {"eigenvalues", "curves"} if html else set()
    if "eigenvalues" in asked or any(condition.column == "spread" for condition in conditions):
        details.add("eigenvalues")
    chosen = parse_spans(layers, "--layers")
    with progress(f"scanning {stored.place}") as tell:
        found = run(stored, layers=chosen, length=length, raw="raw" in asked, details=details, progress=tell)
    _print(console, found, heads=heads)
    save_result(found.to_json(), json=json, html=html, table=table, rows=(row.to_record() for row in found.heads))
    raise_refused(found.refused)
    _exit_on(console, conditions, found)


def _print(console: Console, found: "Scan", *, heads: bool) -> None:
    from ..report.terminal import HeatMap
    from ..scanning.scan import NORMALISED

    family, coverage = escape(shown(found.family)), escape(shown(found.coverage))
    console.print(f"[bold]{family}[/bold], {found.format}, {counted(len(found.heads), 'head')}, {coverage}")
    console.print()
    for told in found.behaviour():
        print_bullet(console, "[red]![/red]" if told.sentence == RANDOM_WEIGHTS else "[green]·[/green]", told.sentence)
    console.print()
    console.print(f"[dim]{KEY}[/dim]")
    console.print(_head_table(found.heads) if heads else _layer_table(found.heads))
    console.print()
    known = any(row.estimated_near_mass is not None for row in found.heads)
    console.print(HeatMap.of(found.to_json(), "estimated_near_mass" if known else "xi"))
    for sentence in describe_theory(row.regime for row in found.heads):
        console.print(sentence, highlight=False)
    console.print(MEASURE, highlight=False)
    if found.normalised:
        console.print(NORMALISED)
    for sentence in found.refused:
        console.print(f"[red]! not read:[/red] {escape(sentence)}", soft_wrap=True)


def _layer_table(rows: "tuple[HeadRow, ...]") -> FittedTable:
    """Medians of each layer, and how many of its heads have each regime that occurs in the model."""
    counts = Counter(row.regime for row in rows)
    present = [regime for regime in REGIME_WORDS if regime in counts]
    body = []
    for (block, layer), group in groupby(rows, key=lambda row: (row.block, row.layer)):
        of_layer = list(group)
        ratios = [row.xi for row in of_layer]
        body.append(
            [
                f"{block} {layer}",
                *(_median(name, of_layer) for name in COLUMNS),
                f"{min(ratios):.1f} … {max(ratios):.1f}",
                *(str(sum(row.regime == regime for row in of_layer) or "") for regime in present),
            ]
        )
    headings = ["layer", *(quantity(name).heading for name in COLUMNS), RANGE]
    rarest = [REGIME_WORDS[regime].short for regime, _ in reversed(counts.most_common())]
    spare = [RANGE, *(quantity(name).heading for name in SPARE), *rarest]
    headings += [REGIME_WORDS[regime].short for regime in present]
    return fitted(headings, body, words=["layer"], spare=spare, title=MEDIANS)


def _head_table(rows: "tuple[HeadRow, ...]") -> FittedTable:
    raw = {"tr W²": "trace_of_square", "‖W‖²": "frobenius_squared"}
    body = [
        [
            head_name(*row.place),
            *(_median(name, [row]) for name in COLUMNS),
            *(f"{getattr(row, name):.3g}" for name in raw.values()),
            row.regime,
        ]
        for row in rows
    ]
    headings = ["head", *(quantity(name).heading for name in COLUMNS), *raw, "regime"]
    return fitted(headings, body, words=["head", "regime"], spare=[*raw])


def _median(name: str, rows: "list[HeadRow]") -> str:
    """The median of a column over some heads, in its own digits; a dash where it is not known."""
    column, _, unit = name.partition("_over_")
    known = [
        getattr(row, column) / (row.temperature if unit else 1) for row in rows if getattr(row, column) is not None
    ]
    return quantity(name).text(median(known)) if known else "–"


def _exit_on(console: Console, conditions: "Sequence[Condition]", found: "Scan") -> None:
    from ..scanning.rows import failures

    met = failures(conditions, found.heads)
    for condition, rows in met.items():
        names = ", ".join(head_name(*row.place) for row in rows[:MOST_FAILURES]) + (
            " …" if len(rows) > MOST_FAILURES else ""
        )
        console.print(f"[red]--fail-on {condition.text}[/red] is met by {counted(len(rows), 'head')}: {names}")
    if met:
        raise typer.Exit(FAIL_ON_MET)
