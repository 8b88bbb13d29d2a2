"""Parts of `locater theory`: the phase diagram, and a head's spectrum followed through layers."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import refusal
from ..quantities import REGIME_WORDS
from ..records import Json
from .output import FittedTable, console_for, table
from .results import progress, save_result

if TYPE_CHECKING:
    from torch import Tensor

MOST_LAYERS = 128
NUM_DRAWS = 64
VARIANTS = {"attention alone": False, "residual and norm": True}
KINDS = {"localized": "localized, |tr W| ≤ λ", "localized-beyond": "localized, |tr W| > λ", "elsewhere": "elsewhere"}


def show_phase_diagram(*, plot: Path | None, json: Path | None) -> None:
    """Compute, print, and save what was asked for."""
    import torch

    from ..theory.phase_diagram import phase_diagram

    console = console_for(json)
    with progress("computing the plane", long=True) as tell:
        document = phase_diagram(generator=torch.Generator().manual_seed(0), progress=tell)
    console.print(_map(document), markup=False)
    console.print()
    console.print(_counts(document))
    console.print(_describe_independent(document), markup=False)
    save_result(document, json=json, plot=plot)


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


def _describe_independent(document: Json) -> str:
    found, length = document["independent_tokens"], document["length"]
    return (
        f"These tokens are walks. Over {length} independent tokens after a norm, true softmax attention loses its "
        f"entropy beyond a deviation of {found['collapse_deviation']:.2f} λ, whatever the mean."
    )


def depth_document(query: "Tensor", key: "Tensor", *, layers: int, length: int, temperature: float | None) -> Json:
    """Entropy and rank residual of `layers` layers that share the spectrum of this head, on a random walk."""
    import torch

    from ..spectra import moments
    from ..theory.depth import layer_of_moments, propagate, walk_kernel

    if not 1 <= layers <= MOST_LAYERS:
        raise refusal(f"1 to {MOST_LAYERS} layers", layers)
    spectrum, kernel = moments(query, key), walk_kernel(length)
    document: Json = {"layers": layers, "draws": NUM_DRAWS}
    for name, norm in VARIANTS.items():
        layer = layer_of_moments(spectrum, temperature=temperature, norm=norm)
        generator = torch.Generator().manual_seed(0)
        passed = propagate(kernel, [layer] * layers, num_draws=NUM_DRAWS, generator=generator)
        document |= {"trace": layer.trace, "deviation": layer.deviation, "symmetry": layer.symmetry}
        document[name] = {
            "entropy": passed.entropy.mean.tolist(),
            "entropy_error": passed.entropy.standard_error.tolist(),
            "residual": passed.residual.mean.tolist(),
            "residual_error": passed.residual.standard_error.tolist(),
        }
    return document


def depth_table(document: Json) -> FittedTable:
    """Layer by layer, both variants side by side."""
    columns = [f"{short} {name}" for short in ("bare", "norm") for name in ("entropy", "rank residual")]
    rows = []
    for index in range(document["layers"]):
        numbers = [
            f"{document[name][what][index]:.3f} ± {document[name][f'{what}_error'][index]:.3f}"
            for name in VARIANTS
            for what in ("entropy", "residual")
        ]
        rows.append([str(index + 1), *numbers])
    return table(["layer", *columns], rows)


def depth_sentence(document: Json) -> str:
    """The question that the table answers, and its limit."""
    return (
        f"Through {document['layers']} layers with this spectrum (tr W = {document['trace']:.3g} λ, rest "
        f"{document['deviation']:.3g} λ, symmetry {document['symmetry']:.2f}), weights not aligned with the tokens: "
        "entropy of attention (1: uniform), and how distinct tokens stay (0: all alike)."
    )
