"""The paper's central claim on one plane: eigenvalue mean against variance, theory beside a real softmax layer.

Theory: regime and localisation of the closed form. Measured: entropy of true softmax attention over random-walk
tokens, and how distinct the tokens are that it mixes. The localized region should avoid both collapses.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import statistics
from ..quantities import LOCALIZED
from ..records import Json
from ..spectra import Moments
from . import closed_form, random_energy, regimes

# A logit grows along the walk by tr W/λ per token, so beyond |tr W| = λ softmax falls by more than a factor e from one
# token to the next: localized still, but on so few tokens that it is counted apart.
REGIONS = ("localized", "localized-beyond", "elsewhere")
# Below these a layer has collapsed: attention on about one token, or outputs that are nearly all alike.
ENTROPY_COLLAPSE = 0.25
RANK_COLLAPSE = 0.15
# The plane, in units of λ: tr W/λ along x, √d·(standard deviation)/λ along y.
TRACES = tuple(sign * 10 ** (step / 4) for sign in (-1, 1) for step in range(-9, 3))
DEVIATIONS = tuple(10 ** (step / 4) for step in range(-10, 4))


def phase_diagram(
    *,
    length: int = 48,
    d_model: int = 64,
    num_walks: int = 32,
    generator: torch.Generator,
    progress: Callable[[int, int], None] | None = None,
) -> Json:
    """Both views at every point of the plane; a symmetric W with Gaussian eigenvalues, λ = √d. Seconds."""
    traces = torch.tensor(sorted((*TRACES, 0.0)), dtype=torch.float64)
    deviations = torch.tensor(DEVIATIONS, dtype=torch.float64)
    theory = _theory(traces, deviations, length=length, d_model=d_model)
    # The same walks and directions at every point: what differs from row to row is the plane, not the draw.
    walks = _draw(length, d_model, num_walks, generator)
    measured = []
    for deviation in deviations.tolist():
        measured.append(_measured(walks, traces, deviation))
        if progress:
            progress(len(measured), len(deviations))
    entropy, residual = zip(*measured, strict=True)
    document = {
        "schema": "locater.phase-diagram/1",
        "length": length,
        "d_model": d_model,
        "trace_over_temperature": traces.tolist(),
        "deviation_over_temperature": deviations.tolist(),
        **theory,
        "normalised_entropy": [row.tolist() for row in entropy],
        "rank_residual": [row.tolist() for row in residual],
        "independent_tokens": _independent_tokens(length),
    }
    return document | {"summary": _summary(document)}


def _independent_tokens(length: int) -> Json:
    """Deviations at which the true softmax over independent tokens freezes (for T → ∞) and at which it collapses.

    Behind a norm their logits have the variance δ², which the trace hardly adds to.
    """
    collapse = random_energy.collapse_variance(length, ENTROPY_COLLAPSE)
    return {"freezing_deviation": math.sqrt(random_energy.border(length)), "collapse_deviation": math.sqrt(collapse)}


def _theory(traces: Tensor, deviations: Tensor, *, length: int, d_model: int) -> Json:
    temperature = math.sqrt(d_model)
    trace = (traces * temperature).expand(len(deviations), -1)
    square = trace.square() / d_model + (deviations[:, None] * temperature).square()
    moments = Moments(trace, square, square, d_model=d_model, d_head=d_model)
    profile = closed_form.from_moments(moments, length=length, temperature=temperature)
    return {
        "regime": [regimes.classify_all(row) for row in profile],
        "localisation": regimes.localisation(profile).tolist(),
        "xi": moments.xi.tolist(),
    }


class _Walks(NamedTuple):
    """Walks X, and the two parts of their logits: X X^T/d of the mean, X B diag(z) B^T X^T/√d of the deviation."""

    tokens: Float[Tensor, "walks length d_model"]
    plain: Float[Tensor, "walks length length"]
    varied: Float[Tensor, "walks length length"]


def _draw(length: int, d_model: int, num_walks: int, generator: torch.Generator) -> _Walks:
    """Each walk has its own W: eigenvalues z of mean 0 and deviation 1 in a random basis B."""
    options: dict[str, Any] = dict(generator=generator, dtype=torch.float64)
    shape = torch.randn(num_walks, 1, d_model, **options)
    shape = (shape - shape.mean(-1, keepdim=True)) / shape.std(-1, correction=0, keepdim=True)
    basis = torch.linalg.qr(torch.randn(num_walks, d_model, d_model, **options)).Q
    tokens = torch.randn(num_walks, length, d_model, **options).cumsum(1)
    turned = tokens @ basis
    return _Walks(tokens, tokens @ tokens.mT / d_model, (turned * shape) @ turned.mT / math.sqrt(d_model))


def _measured(
    walks: _Walks, traces: Float[Tensor, " columns"], deviation: float
) -> tuple[Float[Tensor, " columns"], Float[Tensor, " columns"]]:
    """Normalised entropy and rank residual of one row of the plane, every token attending to all."""
    tokens, plain, varied = walks
    attention = (traces[:, None, None, None] * plain + deviation * varied).softmax(-1)
    entropy = statistics.entropy(attention) / math.log(tokens.shape[1])
    residual = statistics.residual(attention @ tokens) / statistics.residual(tokens)
    return entropy.mean((-2, -1)), residual.mean(-1)


def _summary(document: Json) -> dict[str, dict[str, int]]:
    """Count how often each region collapses: the claim in numbers."""
    counts = {region: {"points": 0, "entropy_collapse": 0, "rank_collapse": 0} for region in REGIONS}
    for row, names in enumerate(document["regime"]):
        for column, name in enumerate(names):
            count = counts[_region(name, document["trace_over_temperature"][column])]
            count["points"] += 1
            count["entropy_collapse"] += document["normalised_entropy"][row][column] < ENTROPY_COLLAPSE
            count["rank_collapse"] += document["rank_residual"][row][column] < RANK_COLLAPSE
    return counts


def _region(regime: str, trace_over_temperature: float) -> str:
    if regime not in LOCALIZED:
        return "elsewhere"
    return "localized" if abs(trace_over_temperature) <= 1 else "localized-beyond"
