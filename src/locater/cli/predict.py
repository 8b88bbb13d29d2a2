"""`locater predict`: what each head will do on a text, and what it does."""

from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..behaviour import head_name
from ..errors import BadArguments, counted, shown
from ..quantities import quantity
from .output import FittedTable, console_for, load, parse_spans, table
from .results import Heads, HtmlPath, JsonPath, Layers, PlotPath, Timeout, progress, save_result

if TYPE_CHECKING:
    from ..prediction.predict import HeadPrediction, Prediction

MEANS = "means of each layer's heads, predicted → measured"


def predict(
    source: Annotated[str, typer.Argument(help="A directory, a GGUF file or a Hugging Face id.")],
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text file, or `random` for random ids (default: Python's docstrings)."),
    ] = None,
    by_line: Annotated[bool, typer.Option("--by-line", help="Take every line as a text of its own.")] = False,
    window: Annotated[int, typer.Option(help="Number of tokens in a window.")] = 256,
    calibration: Annotated[int, typer.Option(help="Number of windows to predict from.")] = 24,
    test: Annotated[int, typer.Option(help="Number of other windows to measure on.")] = 8,
    layers: Layers = None,
    timeout: Timeout = None,
    heads: Heads = False,
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR", help="Another tokenizer: folder or hub id.")] = None,
    plot: PlotPath = None,
    json: JsonPath = None,
    html: HtmlPath = None,
) -> None:
    """Predict where each head looks from its weights and single tokens, and measure it on other text."""
    load("prediction.predict")
    from ..errors import Refusal
    from ..models.sources import Stored
    from ..prediction.predict import RANDOM, Effort, Text
    from ..prediction.predict import predict as run

    try:
        effort = Effort(window=window, calibration=calibration, test=test)
    except Refusal as reason:
        raise BadArguments(str(reason)) from None
    console = console_for(json)
    if text == Path(RANDOM) and (by_line or tokenizer):
        raise BadArguments("--text random goes without --by-line and --tokenizer")
    named = Text(RANDOM if text == Path(RANDOM) else text, tokenizer, by_line)
    chosen = parse_spans(layers, "--layers")
    with progress(f"predicting {source}", long=True) as tell:
        found = run(Stored(source, timeout=timeout), text=named, layers=chosen, effort=effort, progress=tell)
    _print(console, found, heads=heads)
    save_result(found.to_json(), json=json, html=html, plot=plot)


def _print(console: Console, found: "Prediction", *, heads: bool) -> None:
    from ..report.terminal import HeatMap

    tokens = found.tokens
    console.print(f"[bold]{escape(shown(found.source))}[/bold], {counted(len(found.heads), 'head')}", soft_wrap=True)
    console.print(
        f"text: {escape(shown(found.text))}; predicted from {tokens['calibration']:,} tokens "
        f"({found.calibration_windows} windows of {found.length}),\n"
        f"measured on {tokens['test']:,} others ({found.test_windows} windows)",
        soft_wrap=True,
    )
    if found.loss is not None:
        console.print(f"loss on the measured windows: {found.loss:.2f} nats per token")
    console.print()
    console.print(_head_table(found) if heads else _layer_table(found))
    if heads:
        console.print("[dim]each column: predicted → measured[/dim]")
    console.print(HeatMap.of(found.to_json(), "measured_near_mass_beyond_first"))
    console.print()
    console.print(_agreement(found))
    console.print("[dim]ceiling: about what a perfect prediction would reach, since few windows are measured[/dim]")
    for sentence in found.warnings:
        console.print(f"[red]![/red] {escape(shown(sentence))}")
    for sentence in found.left_out:
        console.print(f"[red]! left out:[/red] {escape(shown(sentence))}", soft_wrap=True)
    console.print()
    for sentence in [*(told.sentence for told in found.behaviour()), *found.accuracy()]:
        console.print(sentence, markup=False, highlight=False)


def _layer_table(found: "Prediction") -> FittedTable:
    body = []
    for (block, layer), group in groupby(found.heads, key=lambda head: (head.block, head.layer)):
        of_layer = list(group)
        body.append([f"{block} {layer}", *(_pair(of_layer, name) for name in found.spearman)])
    return table(["layer", *_headings(found)], body, words=["layer"], title=MEANS)


def _head_table(found: "Prediction") -> FittedTable:
    body = [[head_name(*head.place), *(_pair([head], name) for name in found.spearman)] for head in found.heads]
    return table(["head", *_headings(found)], body, words=["head"])


def _headings(found: "Prediction") -> list[str]:
    return [quantity(name).heading for name in found.spearman]


def _pair(heads: "list[HeadPrediction]", name: str) -> str:
    """The means of some heads, predicted and measured."""
    sides = [head.predicted for head in heads], [head.measured for head in heads]
    return " → ".join(quantity(name).text(mean(getattr(one, name) for one in side)) for side in sides)


def _agreement(found: "Prediction") -> FittedTable:
    ranked, most, errors = found.spearman, found.ceiling, found.calibration_error
    body = []
    for name in ranked:
        rank = "–" if ranked[name] is None else f"{ranked[name]:.3f}"
        ceiling = f"{most[name]:.3f}" if most[name] else "–"  # halves that do not agree tell of none
        body.append([quantity(name).heading, rank, ceiling, f"{errors[name]:.3g}", quantity(name).words])
    return table(["number", "Spearman", "ceiling", "error", "meaning"], body, words=["number", "meaning"])
