"""Behaviour of heads on random ids, for the commands that show it."""

from itertools import groupby
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from ..errors import shown
from .output import table
from .progress import progress

if TYPE_CHECKING:
    from ..prediction.probe import Probe

COLUMNS = {
    "near_mass_beyond_first": "near",
    "normalised_entropy": "entropy",
    "sink_mass": "sink",
    "mean_distance": "distance",
}


def probe_with_progress(source: str, options: dict[str, Any]) -> "Probe":
    from ..prediction.probe import probe as run

    with progress(f"running {source} on random ids", steps="layers", long=True) as tell:
        return run(source, progress=tell, **options)


def print_probe(console: Console, found: "Probe", *, heads: bool) -> None:
    """A line for every layer or head, what it is of, and what was left out."""
    body = []
    for place, group in groupby(found.heads, key=lambda one: (one.block, one.layer, one.head if heads else None)):
        numbers = [one.numbers for one in group]
        label = f"{place[0]} {place[1]}" + (f".{place[2]}" if heads else "")
        body.append([label, *(f"{mean(getattr(one, name) for one in numbers):.3f}" for name in COLUMNS)])
    console.print(table(["head" if heads else "layer", *COLUMNS.values()], body, words=["head", "layer"]))
    tokens = f"{found.windows} windows of {found.length} random ids"
    console.print(f"[dim]on {tokens}, not on text: ranks of near mass hold best, sinks least[/dim]")
    for sentence in found.left_out:
        console.print(f"[red]! left out:[/red] {escape(shown(sentence))}", soft_wrap=True)
