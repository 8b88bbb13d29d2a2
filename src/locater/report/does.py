"""Words of behaviour for each head of a view: the first colours the map, and the page's verdict counts them all."""

import math
from collections import Counter
from typing import NamedTuple

from ..behaviour import (
    ESTIMATED,
    FIT_NONE,
    FITS_NONE,
    MOSTLY_FAR,
    MOSTLY_NEAR,
    NO_WORD,
    RANDOM_IDS,
    TOO_CLOSE,
    UNCLEAR,
    VOCABULARY,
    MeanAttention,
    looks,
    words_of,
)
from ..errors import counted
from .views import Document, View

MEASURED = ("near_mass_beyond_first", "normalised_entropy", "sink_mass")
MEASURED_SIDES = ("measured_", "")  # of a column's name, the best evidence first
MOST_WORDS = 3  # in the page's first sentence
# Colours that stay apart in print and for colour-blind readers (after Okabe and Ito).
COLOURS = ("#3b3b3b", "#CC79A7", "#E69F00", "#D55E00", "#e8dfc4", "#0072B2", "#7fc8b0", "#56B4E9", "#8a6100")
LETTERS = {"first token": "1", "adjacent": "a", "one token": "o", "broad": "b", "near": "n", "far": "f"}


Words = tuple[str, ...] | None  # that hold for a head, the most telling first; None: nothing is known


class Does(NamedTuple):
    """Words of each head, frame by frame, and the evidence in words."""

    words: list[list[Words]]
    source: str


def legend() -> list[Document]:
    """Name, letter, colour and meaning of every word, as the page needs them."""
    entries = [
        {"name": word.name, "letter": LETTERS.get(word.name, word.name[0]), "colour": colour, "meaning": word.singular,
         "rule": word.condition}
        for word, colour in zip(VOCABULARY, COLOURS, strict=False)
        if not word.is_rare
    ]  # fmt: skip
    blank = {"letter": "·", "colour": "#b9b3a4"}
    none = {"name": NO_WORD, **blank, "meaning": FITS_NONE, "rule": "no rule is met"}
    between = f"estimated share between {MOSTLY_FAR:g} and {MOSTLY_NEAR:g}"
    return [*entries, none, {"name": UNCLEAR, **blank, "meaning": f"is {TOO_CLOSE}", "rule": between}]


def does(view: View) -> Does:
    """Say what the heads of a view do, from the best evidence it has: measured, or estimated from the weights."""
    measured = [attentions_of(view, frame) for frame in range(len(view.frames))]
    if any(one for frame in measured for one in frame):
        text = view.facts.get("text", "")
        words: list[list[Words]] = [
            [None if one is None else tuple(word.name for word in words_of(one, text)) or (NO_WORD,) for one in frame]
            for frame in measured
        ]
        return Does(words, "measured on random ids" if text == RANDOM_IDS else "measured on text")
    near = view.columns.get("estimated_near_mass")
    if near is None or not any(record.get("estimated_near_mass_interval") for record in view.records):
        return Does([[None] * len(view.heads) for _ in view.frames], "")
    words = [[None if mass is None else (looks(mass) or UNCLEAR,) for mass in frame] for frame in near]
    return Does(words, ESTIMATED)


def attentions_of(view: View, frame: int) -> list[MeanAttention | None]:
    """Measured attention of every head: with the shares at distance 0 and 1 where profiles have them.

    What is not known is NaN and meets no rule; None where nothing of a head is known.
    """

    def column(name: str) -> list[float]:
        sides = [view.columns[side + name] for side in MEASURED_SIDES if side + name in view.columns]
        known = sides[0][frame] if sides else [None] * len(view.heads)
        return [math.nan if value is None else value for value in known]

    near, entropy, first = (column(name) for name in MEASURED)
    # With the first token in it a small near mass tells nothing: a sink is not far.
    near = [
        own if own == own else mass if mass > 0.5 else math.nan
        for own, mass in zip(near, column("near_mass"), strict=True)
    ]
    profiles: list[list[float]] = [[math.nan] * 2 for _ in view.heads]
    if len(view.frames) == 1:
        for n, record in enumerate(view.records):
            profile = record.get("attention_profile") or {}
            if isinstance(profile, dict) and len(profile.get("measured") or ()) > 1:
                profiles[n] = profile["measured"]
    found = zip(near, entropy, first, profiles, strict=True)
    every = [MeanAttention(*three, *profile[:2]) for *three, profile in found]
    return [one if any(value == value for value in one) else None for one in every]


def head_verdict(view: View) -> str:
    """One sentence on what the heads of a model do: the commonest words, and the evidence."""
    found = does(view)
    counts = Counter(word for words in found.words[-1] for word in words or ())
    without, unclear = counts.pop(NO_WORD, 0), counts.pop(UNCLEAR, 0)
    unknown = sum(words is None for words in found.words[-1])
    layers = len({key[:2] for key in view.heads})
    opening = f"{counted(len(view.heads), 'head')} in {counted(layers, 'layer')}"
    if not counts and not unclear:
        return f"{opening}."
    words = {word.name: word for word in VOCABULARY}
    probably = "probably " if found.source == ESTIMATED else ""
    common = counts.most_common(MOST_WORDS)
    named = [words[name].clause(f"{number:,}", number, probably=probably) for name, number in common]
    fits = (FITS_NONE if without == 1 else FIT_NONE).replace("these", "the" if len(counts) > MOST_WORDS else "these")
    named += [f"{without:,} {fits}"] if without else []
    named += [f"{unclear:,} {'is' if unclear == 1 else 'are'} {TOO_CLOSE}"] if unclear else []
    named += [f"of {unknown:,} nothing is known"] if unknown else []
    listed = ", ".join(named[:-1]) + (f" and {named[-1]}" if len(named) > 1 else named[-1])
    overlap = "; a head may do several" if any(len(words or ()) > 1 for words in found.words[-1]) else ""
    return f"{opening}: {listed} ({found.source}{overlap})."
