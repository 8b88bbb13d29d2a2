"""`locater theory --phase-diagram`: where attention localises, and what a softmax layer does there."""

from pathlib import Path

from rich.markup import escape

from ..quantities import REGIME_WORDS
from ..records import Json
from .output import FittedTable, console_for, table
from .progress import progress

KINDS = {"localized": "localized, |tr W| ≤ λ", "localized-beyond": "localized, |tr W| > λ", "elsewhere": "elsewhere"}


def run(*, plot: Path | None, json: Path | None) -> None:
    """Compute, print, and save what was asked for."""
    import torch

    from ..records import write_json
    from ..theory.phase_diagram import phase_diagram

    console = console_for(json)
    with progress("computing the plane", steps="rows", long=True) as tell:
        document = phase_diagram(generator=torch.Generator().manual_seed(0), progress=tell)
    console.print(_map(document), markup=False)
    console.print()
    console.print(_counts(document))
    console.print(_independent(document), markup=False)
    if plot:
        from ..report import figures

        figures.save(figures.phase_diagram(document), plot)
        console.print(f"picture: {escape(str(plot))}", soft_wrap=True)
    if json:
        write_json(document, json)


def _map(document: Json) -> str:
    """The theory's regimes, a letter per point."""
    rows = ["regime by eigenvalue mean (→, tr W/λ) and spread (↑, √d·deviation/λ):", ""]
    for deviation, regimes in reversed(
        list(zip(document["deviation_over_temperature"], document["regime"], strict=True))
    ):
        rows.append(f"{deviation:8.3g} │ " + " ".join(REGIME_WORDS[regime].letter for regime in regimes))
    traces = document["trace_over_temperature"]
    middle = len(traces) - 1
    rows.append(" " * 9 + "└" + "─" * (2 * len(traces)))
    rows.append(" " * 9 + f"{traces[0]:.3g}".ljust(middle) + "0" + f"{traces[-1]:.3g}".rjust(middle + 2))
    rows += ["", "E early  M middle  L late  · uniform  x mixed  (blank) no-signal"]
    return "\n".join(rows)


def _counts(document: Json) -> FittedTable:
    rows = [
        [KINDS[name], str(count["points"]), str(count["entropy_collapse"]), str(count["rank_collapse"])]
        for name, count in document["summary"].items()
    ]
    headings = ["region", "points", "entropy collapse", "rank collapse"]
    return table(headings, rows, words=["region"], title="what a softmax layer does")


def _independent(document: Json) -> str:
    found, length = document["independent_tokens"], document["length"]
    return (
        f"These tokens are walks. Over {length} independent tokens behind a norm, true softmax attention loses its "
        f"entropy beyond a deviation of {found['collapse_deviation']:.2f} λ, whatever the mean."
    )
