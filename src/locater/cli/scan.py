"""`locater scan`: every head's query-key spectrum, straight from the files."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..budget import limited
from ..errors import BadArguments, counted, shown
from ..scanning import DEFAULT_LENGTH
from ..theory.words import WORDS
from .options import AllowPickle, CsvPath, Heads, HtmlPath, JsonPath, Layers, Layout, Length, ParquetPath, Raw, Timeout
from .output import FittedTable, console_for, example, parse_spans, print_bullet, table
from .pages import save_html
from .probe import print_probe, probe_with_progress
from .scans import raise_refused, scan_with_progress

if TYPE_CHECKING:
    from ..prediction.probe import Probe
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
Eigenvalues = Annotated[
    bool, typer.Option("--eigenvalues", help="Compute eigenvalues too: column `spread`, and all in JSON.")
]
FailOn = Annotated[
    str | None, typer.Option(metavar="'xi<0.5 …'", help="Exit 3 if a head meets one of these conditions.")
]
RunOnce = Annotated[
    bool, typer.Option("--probe", help="Run the model once on random ids, layer by layer from its file.")
]


def scan(
    source: Source = None,
    heads: Heads = False,
    layers: Layers = None,
    length: Length = DEFAULT_LENGTH,
    temperature: Annotated[float | None, typer.Option(help="λ for all heads, instead of each head's own.")] = None,
    raw: Raw = False,
    eigenvalues: Eigenvalues = False,
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="A LoRA adapter on top of the source.")] = None,
    layout: Layout = None,
    allow_pickle: AllowPickle = False,
    timeout: Timeout = None,
    fail_on: FailOn = None,
    probe: RunOnce = False,
    json: JsonPath = None,
    html: HtmlPath = None,
    exact: Annotated[bool, typer.Option("--exact", help="Add exact profiles to JSON and page (slow).")] = False,
    csv: CsvPath = None,
    parquet: ParquetPath = None,
) -> None:
    """Every head's query-key spectrum, the theory's word for it, and where it probably looks: from weights alone."""
    console, source = console_for(json), source or example()
    if probe and (adapter or layout or allow_pickle):
        raise BadArguments("--probe goes without --adapter, --layout and --allow-pickle")
    conditions = _conditions(fail_on, probe=probe)
    eigenvalues |= html is not None or any(condition.column == "spread" for condition in conditions)
    options = dict(length=length, temperature=temperature, raw=raw, eigenvalues=eigenvalues)
    options |= dict(curves=html is not None or exact, exact=exact)
    options |= dict(adapter=adapter, layout=layout, allow_pickle=allow_pickle, layers=parse_spans(layers, "--layers"))
    with limited(seconds=timeout):
        found = scan_with_progress(source, options)
        probed = probe_with_progress(source, dict(layers=options["layers"])) if probe else None
    found = found if probed is None else probed.onto(found)
    _print(console, found, probed, heads=heads)
    _save(found, json=json, csv=csv, parquet=parquet)
    if html:
        save_html([found.to_json()], html)
    raise_refused(found.refused)
    _exit_on(console, conditions, found)


def _conditions(fail_on: str | None, *, probe: bool) -> "Sequence[Condition]":
    from ..scanning.conditions import parse

    conditions = parse(fail_on) if fail_on is not None else ()
    if not probe and any(condition.column.startswith("probed_") for condition in conditions):
        raise BadArguments("--fail-on with a column that begins with probed_ needs --probe")
    return conditions


def _print(console: Console, found: "Scan", probed: "Probe | None", *, heads: bool) -> None:
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
    if probed is not None:
        console.print()
        print_probe(console, probed, heads=heads)


def _layer_table(rows: "tuple[HeadRow, ...]") -> FittedTable:
    """Medians of each layer, and how many of its heads have each regime that occurs in the model."""
    present, near = [regime for regime in WORDS if any(row.regime == regime for row in rows)], _near_column(rows)
    body = []
    for (block, layer), group in groupby(rows, key=lambda row: (row.block, row.layer)):
        of_layer = list(group)
        ratios = [row.xi for row in of_layer]
        counts = [sum(row.regime == regime for row in of_layer) for regime in present]
        body.append(
            [
                f"{block} {layer}",
                *(_near(of_layer) for _ in near),
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
        *near,
        "tr W/λ",
        "η/λ",
        "ξ",
        RANGE,
        "local",
        *(WORDS[regime].short for regime in present),
    ]
    return table(headings, body, words=["layer"], spare=[RANGE, "tr W/λ"], title=MEDIANS)


def _head_table(rows: "tuple[HeadRow, ...]") -> FittedTable:
    from ..scanning.findings import name

    near = _near_column(rows)
    body = [
        [
            name(row),
            *(_near([row]) for _ in near),
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
    headings = ["head", *near, "tr W/λ", "tr W²", "‖W‖²", "η/λ", "ξ", "local", "regime"]
    return table(headings, body, words=["head", "regime"], spare=["tr W²", "‖W‖²"])


def _near_column(rows: "tuple[HeadRow, ...]") -> list[str]:
    """No estimates where all heads were measured on random ids: those have a table of their own."""
    return ["near?"] if any(row.probed_near_mass_beyond_first is None for row in rows) else []


def _near(rows: "list[HeadRow]") -> str:
    """The median of the estimated near mass, nothing where there is none."""
    known = [row.estimated_near_mass for row in rows if row.estimated_near_mass is not None]
    return f"{median(known):.2f}" if known else "–"


def _save(found: "Scan", *, json: Path | None, csv: Path | None, parquet: Path | None) -> None:
    from ..records import write_csv, write_json, write_parquet

    if json:
        write_json(found.to_json(), json)
    rows = [row.to_record() for row in found.heads]
    if csv:
        write_csv(rows, csv)
    if parquet:
        write_parquet(rows, parquet)


def _exit_on(console: Console, conditions: Any, found: "Scan") -> None:
    from ..scanning.conditions import failures
    from ..scanning.findings import name

    met = failures(conditions, found.heads)
    for condition, rows in met.items():
        names = ", ".join(name(row) for row in rows[:MOST_FAILURES]) + (" …" if len(rows) > MOST_FAILURES else "")
        console.print(f"[red]--fail-on {condition.text}[/red] is met by {counted(len(rows), 'head')}: {names}")
    if met:
        raise typer.Exit(FAIL_ON_MET)
