"""A head over position and distance, for pictures: ρ by each method, and the logit that its weights expect."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..head import Head
from ..spectra import Grams, Moments, rotary_forms, rotation
from ..theory import closed_form, exact

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


def curves_of(
    groups: list[list[Head]], grams: Grams, found: Moments, profiles: Tensor, settings: "Settings"
) -> list[Curves]:
    """Every head of a chunk: ρ without positions, ρ with them where there are any, and the expected logit."""
    first, length = groups[0][0], settings.length
    temperature = settings.temperature_of(first)
    at = positions(length, NUM_POINTS)
    closed = closed_form.at(at.double(), found, length=length, temperature=temperature).flatten(0, 1)
    placed = first.rotary is not None or first.position_bias is not None
    thinned = profiles[:, positions(profiles.shape[1], NUM_POINTS) - 1]
    logits = _expected_logits(groups, grams, length) / temperature if first.rotary is not None else None
    heads = [head for group in groups for head in group]
    rows: list[Curves] = []
    for number, head in enumerate(heads):
        own: Curves = {"profiles": {"closed": closed[number].tolist()}}
        if placed:
            own["profiles"]["positions"] = thinned[number].tolist()
        if settings.exact and head.query.is_linear and head.key.is_linear:
            own["profiles"]["exact"] = _exact(head, settings)
        if logits is not None:
            own["expected_logits"] = {"weights": logits[number].tolist()}
        rows.append(own)
    return rows


def _expected_logits(groups: list[list[Head]], grams: Grams, length: int) -> Tensor:
    """tr W(Δ) of every head: the expected logit, times λ, of two tokens of one white content at distance Δ."""
    rotary = groups[0][0].rotary
    assert rotary is not None
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
