"""Everything that is said about heads in words, for terminal, summary and page alike; needs no torch.

Each word for what heads do is a rule on attention: measured on text or random ids, or estimated from weights.
docs/evidence.md has its precision, model by model, for the sources that may say it. Words of the paper's theory come
last and say so.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .errors import counted
from .quantities import NEAR
from .reference import unusual

# A head's place: block, layer, head.
Place = tuple[str, int, int]
MOST_HEADS = 3  # that a reader is sent to
MOST_UNUSUAL = 2  # sentences on what differs from reference models
MOST = 0.9  # of the heads of a word lie within the layers that a sentence names
# Of an estimated near mass: half of the mass, and a fifth to be sure. Beyond these a word about what a head does was
# right of more than four heads in five of all models together, if not of each (docs/evidence.md).
MOSTLY_NEAR, MOSTLY_FAR = 0.7, 0.3
ESTIMATED = "estimated from the weights"
APART = "the first token left out"
NOT_ESTIMATED = "The weights alone do not tell what these heads do."
# Over the models of docs/evidence.md; a test counts them again.
RECORD = (
    "Such words cover 39% of the heads of ten models, right for 154 of 160 heads (near) and 119 of 126 (far). "
    "How much rests on the first token, weights do not tell."
)
RANDOM_WEIGHTS = "The weights look random, not trained: no head's tr W is larger than chance makes it."


def head_name(block: str, layer: int, head: int) -> str:
    """
    >>> head_name("decoder", 3, 1)
    'decoder 3.1'
    """
    return f"{block} {layer}.{head}"


class MeanAttention(NamedTuple):
    """Mean attention of one head over queries: the numbers that the words are rules of.

    `first` is the mass on the first token; `near`, `itself` and `adjacent` are shares of the mass that is not on it, on
    keys nearer than 16, on the query's own token and on tokens at distance 1. `entropy` is over log n.
    """

    near: float
    entropy: float
    first: float
    itself: float
    adjacent: float


NUMBERS = MeanAttention._fields


class Word(NamedTuple):
    """A word: its name in tables, its phrase for several heads, its number, and the rule."""

    name: str
    plural: str
    number: str
    limit: float
    is_low: bool = False  # the number is at most the limit, not at least
    is_apart: bool = False  # only heads that do not rest on the first token
    is_uneven: bool = False  # only heads that are not broad: of even attention most is beyond the nearest tokens, too
    is_rare: bool = False  # too few such heads were measured twice: it is judged in docs/evidence.md, and never said
    margin: float | None = None  # beyond the limit, on random ids; None: random ids do not tell it

    @property
    def singular(self) -> str:
        """The phrase for one head.

        >>> VOCABULARY[1].plural, VOCABULARY[1].singular
        ('look at themselves', 'looks at itself')
        """
        verb, _, rest = self.plural.partition(" ")
        return f"{verb}s {rest}".replace("themselves", "itself")

    def clause(self, heads: str, number: int, *, probably: str = "") -> str:
        """Say of some heads that the word holds.

        >>> VOCABULARY[0].clause("2 of 9 heads", 2), VOCABULARY[0].clause("1 of 9 heads", 1)
        ('2 of 9 heads rest on the first token', '1 of 9 heads rests on the first token')
        """
        return f"{heads} {probably}{self.singular if number == 1 else self.plural}"

    def stricter(self, margin: float) -> "Word":
        return self._replace(limit=self.limit + (-margin if self.is_low else margin))

    def holds(self, attention: MeanAttention) -> bool:
        value = getattr(attention, self.number)
        is_met = value <= self.limit if self.is_low else value >= self.limit
        is_other = (self.is_apart and attention.first >= RESTS) or (self.is_uneven and attention.entropy >= BROAD)
        return is_met and not is_other

    @property
    def condition(self) -> str:
        """The rule in plain words, for readers of a page.

        >>> VOCABULARY[2].condition
        'share of the rest at distance 1 at least 0.5 (on random ids 0.6); less than half on the first token'
        """
        apart = "; less than half on the first token" if self.is_apart else ""
        apart += f"; entropy below {BROAD:g}" if self.is_uneven else ""
        stricter = f" (on random ids {self.stricter(self.margin).limit:g})" if self.margin else ""
        return f"{MEANINGS[self.number]} at {'most' if self.is_low else 'least'} {self.limit:g}{stricter}{apart}"

    @property
    def rule(self) -> str:
        """The rule in words, for documentation."""
        sign = "≤" if self.is_low else "≥"
        return (
            f"{self.number} {sign} {self.limit:g}"
            + (f", first < {RESTS:g}" if self.is_apart else "")
            + (f", entropy < {BROAD:g}" if self.is_uneven else "")
        )


# Every word's number; "the rest" is the attention that is not on the first token.
MEANINGS = {
    "first": "share of the attention on the first token",
    "itself": "share of the rest on the token itself",
    "adjacent": "share of the rest at distance 1",
    "entropy": "entropy over log n",
    "near": f"share of the rest on the {NEAR} nearest tokens",
}
EMBEDDED, RANDOM_IDS = "Python's docstrings", "random ids"  # names of what is read where no text is given
NO_WORD = "none"  # the name in tables where no word holds
FIT_NONE, FITS_NONE = "fit none of these words", "fits none of these words"
UNCLEAR, TOO_CLOSE = "unclear", "too close to call"  # in tables and in words: an estimate between near and far
FEWEST_HEADS = 8  # whose traces tell whether a model is trained
RESTS = 0.5  # of the mass: more is "rests on"
BROAD = 0.8  # of the entropy of even attention
VOCABULARY = (
    Word("first token", "rest on the first token", "first", RESTS),
    Word("itself", "look at themselves", "itself", 0.5, is_apart=True, is_rare=True),
    Word("adjacent", "look at an adjacent token", "adjacent", 0.5, is_apart=True, margin=0.1),
    Word("one token", "keep to one token", "entropy", 0.1, is_low=True),
    Word("broad", "spread over nearly all tokens", "entropy", BROAD),
    Word("near", f"look mostly at the {NEAR} nearest tokens", "near", 0.7, is_apart=True, margin=0.05),
    Word(
        "far",
        f"look mostly beyond the {NEAR} nearest tokens",
        "near",
        0.3,
        is_low=True,
        is_apart=True,
        is_uneven=True,
        margin=0.1,
    ),
)


def numbers_of(numbers: Mapping[str, float], profile: Sequence[float]) -> MeanAttention:
    """Take the numbers of a document of `predict` or of random ids; `profile` is by `distance_bins`: 0, 1, …"""
    return MeanAttention(
        numbers["near_mass_beyond_first"], numbers["normalised_entropy"], numbers["sink_mass"], profile[0], profile[1]
    )


def spoken(text: str) -> list[Word]:
    """List the words that may be said from this text: on random ids some, each with a margin."""
    if text != RANDOM_IDS:
        return [word for word in VOCABULARY if not word.is_rare]
    return [word.stricter(word.margin) for word in VOCABULARY if word.margin is not None]


def words_of(attention: MeanAttention, text: str = "") -> list[Word]:
    """List the words that hold for a head, the most telling first.

    >>> [word.name for word in words_of(MeanAttention(near=0.9, entropy=0.05, first=0.0, itself=0.97, adjacent=0.01))]
    ['one token', 'near']
    """
    return [word for word in spoken(text) if word.holds(attention)]


class Told(NamedTuple):
    """A sentence, and the numbers of the heads that it speaks of."""

    sentence: str
    heads: tuple[int, ...]


def describe_heads(places: Sequence[Place], attentions: Sequence[MeanAttention], *, text: str) -> list[Told]:
    """Tell how many heads do what and in which layers, then which heads to look at first and why."""
    members = {
        word: heads for word in spoken(text) if (heads := [n for n, a in enumerate(attentions) if word.holds(a)])
    }
    source = "on random ids" if text == RANDOM_IDS else "on the text measured"
    counts = []
    for word, heads in members.items():
        places_said = _count_places([attentions[n] for n in heads]) if word.name == "one token" else ""
        brackets = "; ".join(filter(None, ("" if counts else source, places_said)))  # the source is said once
        sentence = f"{_count(len(heads), len(places), word)}{in_layers(places, heads)}" + (
            f" ({brackets})" if brackets else ""
        )
        counts.append(Told(f"{sentence}.", tuple(heads)))
    spoken_of = {n for heads in members.values() for n in heads}
    others = tuple(n for n in range(len(places)) if n not in spoken_of)
    if counts and others:
        fits = FITS_NONE if len(others) == 1 else FIT_NONE
        counts.append(Told(f"{len(others):,} of {len(places):,} heads {fits}.", others))
    return [*counts, *_unusual(places, members, text), *_look_first(places, attentions, members)]


def _unusual(places: Sequence[Place], members: Mapping[Word, list[int]], text: str) -> list[Told]:
    """Tell what differs most from the models that come with this package, which were measured on text."""
    if text == RANDOM_IDS:
        return []
    words = {word.name: word for word in spoken(text)}
    blocks = {place[0] for place in places}
    found = unusual(blocks, len(places), {name: len(members.get(word, ())) for name, word in words.items()})
    return [
        Told(
            f"Unusual: {one.share:.0%} of the heads {words[one.word].plural}; "
            f"in {one.models} reference {blocks.copy().pop()}s it is {one.low:.0%} to {one.high:.0%}.",
            tuple(members.get(words[one.word], ())),
        )
        for one in found[:MOST_UNUSUAL]
    ]


def _count(number: int, total: int, word: Word, *, probably: str = "") -> str:
    """Say how many heads of how many do what.

    >>> _count(1, 1, VOCABULARY[0]), _count(3, 3, VOCABULARY[0])
    ('The only head rests on the first token', 'All 3 heads rest on the first token')
    """
    several = f"{number:,} of {total:,} heads" if number < total else f"all {total:,} heads"
    clause = word.clause(several if total > 1 else "the only head", number, probably=probably)
    return clause[0].upper() + clause[1:]


def in_layers(places: Sequence[Place], heads: Sequence[int]) -> str:
    """Name the layers that hold most heads of a word, unless they are spread over the whole depth.

    >>> places = [("decoder", layer, 0) for layer in range(10)]
    >>> in_layers(places, [6, 7, 8, 9]), in_layers(places, [3]), in_layers(places, [0, 5, 9])
    (', from layer 6 on', ', in layer 3', '')
    """
    if len({place[0] for place in places}) > 1:  # layers of several stacks have no common depth
        return ""
    depth = sorted({place[1] for place in places})
    found = sorted(places[n][1] for n in heads)
    outside = int(len(found) * (1 - MOST) / 2)
    low, high = found[outside], found[-1 - outside]
    mostly = "mostly " if outside else ""
    if low == high:
        return f", in layer {low}" if len(depth) > 1 else ""
    begins, ends = low > depth[len(depth) // 10], high < depth[-1 - len(depth) // 10]
    if begins and ends:
        return f", {mostly}in layers {low} to {high}"
    return f", {mostly}from layer {low} on" if begins else f", {mostly}up to layer {high}" if ends else ""


def _look_first(
    places: Sequence[Place], attentions: Sequence[MeanAttention], members: Mapping[Word, list[int]]
) -> list[Told]:
    """Choose the clearest head of each of the rarest words: what few heads do tells most about a model."""
    chosen: dict[int, Word] = {}
    for word, heads in sorted(members.items(), key=lambda pair: len(pair[1])):
        rest = [n for n in heads if n not in chosen]
        sign = 1 if word.is_low else -1
        if rest and len(heads) < len(places) and len(chosen) < MOST_HEADS:
            chosen[min(rest, key=lambda n: sign * getattr(attentions[n], word.number))] = word
    if not chosen:
        return []
    named = [f"{head_name(*places[n])}, {_why(attentions[n], word)}" for n, word in chosen.items()]
    why = "the clearest heads of the rarest words" if len(named) > 1 else "the clearest head of the rarest word"
    return [Told(f"Look first at {'; '.join(named)}: {why}.", tuple(chosen))]


def _why(attention: MeanAttention, word: Word) -> str:
    """Say of one head what it is to be looked at for, and of the one token which it is."""
    place = _place(attention) if word.name == "one token" else ""
    return f"which {word.singular}{f', {place}' if place else ''} ({_value(attention, word)})"


def _place(attention: MeanAttention) -> str:
    """Name the place of the one token that a head keeps to, where it is the same for all queries.

    >>> _place(MeanAttention(0.5, 0.0, 0.99, 0.0, 0.0)), _place(MeanAttention(1.0, 0.0, 0.01, 0.99, 0.01))
    ('the first', "the query's own")
    """
    if attention.first >= MOST:
        return "the first"
    return "the query's own" if attention.itself * (1 - attention.first) >= MOST else ""


def _count_places(attentions: Sequence[MeanAttention]) -> str:
    """Count heads by the token that they keep to.

    >>> first = MeanAttention(0.5, 0.0, 0.99, 0.0, 0.0)
    >>> _count_places([first]), _count_places([first, first._replace(first=0.5)])
    ('the first', 'the first in 1')
    """
    counts = Counter(place for one in attentions if (place := _place(one)))
    said = (place + f" in {count:,}" * (count < len(attentions)) for place, count in counts.most_common())
    return ", ".join(said)


def _value(attention: MeanAttention, word: Word) -> str:
    value = getattr(attention, word.number)
    if word.number == "entropy":
        return f"entropy {value:.2f} of 1"
    return f"{1 - value if word.is_low else value:.0%}"


def looks(mass: float | None) -> str | None:
    """The word, `near` or `far`, that an estimated near mass allows; None where it is not known or tells neither."""
    if mass is None or MOSTLY_FAR < mass < MOSTLY_NEAR:
        return None
    return "near" if mass >= MOSTLY_NEAR else "far"


Interval = tuple[float, float]


def describe_estimates(
    places: Sequence[Place], masses: Sequence[float | None], intervals: Sequence[Interval | None]
) -> list[Told]:
    """Tell how many heads probably look near and far, by near masses estimated from weights, and whom to look at first.

    Nothing is said of a mass without an interval: no model with such positions was measured.
    """
    known = {n: mass for n, (mass, own) in enumerate(zip(masses, intervals, strict=True)) if own and mass is not None}
    words = {word.name: word for word in VOCABULARY}
    told = [] if known else [Told(NOT_ESTIMATED, ())]
    for name in ("near", "far"):
        if heads := [n for n in known if looks(known[n]) == name]:
            count = _count(len(heads), len(known), words[name], probably="probably ")
            told.append(
                Told(f"{count}{in_layers(places, heads)}{'' if told else f' ({ESTIMATED}, {APART})'}.", tuple(heads))
            )
    unclear = [n for n in known if looks(known[n]) is None]
    if unclear:
        without = len(places) - len(known)
        rest = f"; {without:,} {_have(without)} no estimate" if without else ""
        are = "is" if len(unclear) == 1 else "are"
        told.append(Told(f"{counted(len(unclear), 'head')} {are} {TOO_CLOSE}{rest}.", tuple(unclear)))
    elif known and len(known) < len(places):
        without = len(places) - len(known)
        told.append(Told(f"{counted(without, 'head')} {_have(without)} no estimate.", ()))
    told += [Told(RECORD, ())] if len(unclear) < len(known) else []
    surest = sorted((n for n in known if n not in unclear), key=lambda n: -abs(known[n] - 0.5))
    different = {known[n]: n for n in reversed(surest)}  # layers that share their weights count once
    chosen = [n for n in surest if n in different.values()][:MOST_HEADS]
    named = [_look_at(places[n], words[looks(known[n]) or "far"], known[n], intervals[n] or (0, 1)) for n in chosen]
    return told + ([Told(f"Look first at {'; '.join(named)}: the surest estimates.", tuple(chosen))] if named else [])


def _have(number: int) -> str:
    return "has" if number == 1 else "have"


def _look_at(place: Place, word: Word, mass: float, interval: Interval) -> str:
    share, low, high = (1 - mass, 1 - interval[1], 1 - interval[0]) if word.is_low else (mass, *interval)
    return f"{head_name(*place)}, which probably {word.singular} ({share:.0%}, likely {low:.0%} to {high:.0%})"


def describe_theory(regimes: Iterable[str | None]) -> list[str]:
    """Count the theory's regimes, with the sentence that they are not what heads do.

    >>> describe_theory(["late", "mixed", "late"])
    ["In the paper's theory: 2 late, 1 mixed. These words describe a random walk, not what heads do."]
    """
    counts = Counter(regime for regime in regimes if regime)
    named = ", ".join(f"{count:,} {regime}" for regime, count in counts.most_common())
    words = "These words describe a random walk, not what heads do."
    return [f"In the paper's theory: {named}. {words}"] if named else []


def look_random(heads: Sequence[tuple[float, float, int]]) -> bool:
    """Tell whether (tr W, ‖W‖², d) of all heads are those of random weights, which no training has moved.

    For independent random queries and keys tr W √d/‖W‖ has mean 0 and variance 1, so its root mean square over n heads
    is 1 ± 1/√(2n). The least of the trained models in docs/evidence.md has 2.4.
    """
    squares = [trace**2 * d / norm for trace, norm, d in {*heads} if norm > 0]  # layers may share their weights
    if len(squares) < FEWEST_HEADS:
        return False
    return math.sqrt(sum(squares) / len(squares)) < 1 + 3 / math.sqrt(2 * len(squares))
