"""The part of `locater theory` that follows a head's spectrum through layers."""

from typing import TYPE_CHECKING

from ..errors import refusal
from ..records import Json
from .output import FittedTable, table

if TYPE_CHECKING:
    from torch import Tensor

MOST_LAYERS = 128
NUM_DRAWS = 64
VARIANTS = {"attention alone": False, "residual and norm": True}


def depth_document(weights: "tuple[Tensor, Tensor]", *, layers: int, options: Json) -> Json:
    """Entropy and rank residual of `layers` layers that share the spectrum of this head, on a random walk."""
    import torch

    from ..spectra import moments, whiten
    from ..theory.depth import layer_of_moments, propagate, walk_kernel

    if not 1 <= layers <= MOST_LAYERS:
        raise refusal(f"1 to {MOST_LAYERS} layers", layers)
    spectrum = moments(*whiten(*weights, options["covariance"]))
    kernel = walk_kernel(options["length"])
    document: Json = {"layers": layers, "draws": NUM_DRAWS}
    for name, norm in VARIANTS.items():
        layer = layer_of_moments(spectrum, temperature=options["temperature"], norm=norm)
        generator = torch.Generator().manual_seed(options["seed"])
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
