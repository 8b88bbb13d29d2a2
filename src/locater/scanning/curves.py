"""A head over position and distance, for pictures: ρ by each method, and the logit that its weights expect."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..head import Head
from ..positions import Rotary
from ..spectra import Grams, Moments, rotary_forms, rotation
from ..theory import closed_form, exact
from .batch import HeadBatch

if TYPE_CHECKING:
    from .layer import Settings

Curves = dict[str, dict[str, list[float]]]
NUM_POINTS = 64
NUM_EXACT_POINTS = 25  # each costs the eigenvalues of a 2d_h×2d_h matrix


def positions(length: int, most: int) -> Tensor:
    """Evenly from 1 to T."""
    return torch.linspace(1, length, min(length, most), dtype=torch.float64).round().long()


def distances(length: int) -> list[int]:
    """From 0, four to every doubling.

    >>> distances(9)
    [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """
    powers = (round(2 ** (step / 4)) for step in range(4 * length.bit_length() + 1))
    return sorted({0, *(distance for distance in powers if distance < length)})


def curves_of(batch: HeadBatch, grams: Grams, found: Moments, profiles: Tensor, settings: "Settings") -> list[Curves]:
    """Every head of a batch: ρ without positions, ρ with them where there are any, and the expected logit."""
    first, length = batch.first, settings.length
    temperature = settings.temperature_of(first)
    at = positions(length, NUM_POINTS)
    closed = closed_form.at(at.double(), found, length=length, temperature=temperature).flatten(0, 1)
    drawn = {"closed": closed.tolist()}
    if first.rotary is not None or first.position_bias is not None:
        drawn["positions"] = profiles[:, positions(profiles.shape[1], NUM_POINTS) - 1].tolist()
    if settings.exact and batch.is_linear:
        drawn["exact"] = [_exact(head, settings) for head in batch.heads]
    rows: list[Curves] = [{"profiles": dict(zip(drawn, own, strict=True))} for own in zip(*drawn.values(), strict=True)]
    if first.rotary is not None:
        logits = _expected_logits(first.rotary, grams, length) / temperature
        rows = [row | {"expected_logits": {"weights": own}} for row, own in zip(rows, logits.tolist(), strict=True)]
    return rows


def _expected_logits(rotary: Rotary, grams: Grams, length: int) -> Tensor:
    """tr W(Δ) of every head: the expected logit, times λ, of two tokens of one white content at distance Δ."""
    forms = rotary_forms(grams, rotary.pairs)
    terms = rotation(torch.tensor(distances(length), dtype=torch.float64), rotary.frequencies(length))
    traces = forms.trace.double() @ terms.mT
    return traces.expand(*grams.core.shape[:-2], -1).flatten(0, 1)


def _exact(head: Head, settings: "Settings") -> list[float]:
    query, key = (
        (projection if settings.raw else projection.folded()).weight.detach().double()
        for projection in (head.query, head.key)
    )
    form = exact.canonical_form(query, key, length=settings.length, temperature=settings.temperature_of(head))
    return exact.evaluate(form, positions(settings.length, NUM_EXACT_POINTS).double()).tolist()
