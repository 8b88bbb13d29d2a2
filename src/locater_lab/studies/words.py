"""Precision of the words for what heads do, judged on models that had no part in choosing anything.

A word that `predict` says is measured, so it is judged by the other half of the windows. A word said from random
ids needs a margin beyond its rule, which the other models choose; a model is judged by theirs.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from locater.behaviour import VOCABULARY, MeanAttention, Word
from locater.records import Json

FEWEST_HEADS, FEWEST_MODELS = 20, 3
ENOUGH, BEYOND_BASE = 0.8, 0.1
RESAMPLES = 2000
MARGINS = (0.0, 0.05, 0.1, 0.15, 0.2)
CHOSEN = 0.9  # precision on the other models that a margin is chosen by
SOURCES = ("text", "random ids")
FEWEST = {"text": 2 * FEWEST_HEADS, "random ids": FEWEST_HEADS}  # on text each half judges the other
HALF = 0.5  # of the mass: more of it is near than far
UNSAID_LIMIT = 0.5
UNSAID = {
    "on separators": f"mass on separators ≥ {UNSAID_LIMIT:g}, on text",
    "repeats (induction)": f"mass after the earlier copy ≥ {UNSAID_LIMIT:g}, random ids twice",
    "repeats, in text": f"the same ≥ {UNSAID_LIMIT:g}, text twice",
}


@dataclass(frozen=True)
class Measured:
    """One head: its attention on two halves of a text and on random ids."""

    halves: tuple[MeanAttention, MeanAttention]
    ids: MeanAttention

    @property
    def text(self) -> MeanAttention:
        return MeanAttention(*((a + b) / 2 for a, b in zip(*self.halves, strict=True)))


Models = Mapping[str, Sequence[Measured]]


@dataclass(frozen=True)
class Judged:
    """Counts of one word in one model: said, right, heads for which it holds, and all heads."""

    said: int
    right: int
    holds: int
    heads: int

    def __add__(self, other: "Judged") -> "Judged":
        return Judged(*(a + b for a, b in zip(_counts(self), _counts(other), strict=True)))

    @property
    def precision(self) -> float:
        return self.right / self.said if self.said else 0.0

    @property
    def base(self) -> float:
        return self.holds / self.heads if self.heads else 0.0


def _counts(judged: Judged) -> tuple[int, int, int, int]:
    return judged.said, judged.right, judged.holds, judged.heads


def read_words(document: Json) -> dict[str, list[Measured]]:
    """The kept rows of runs/studies/words.json, model by model."""
    return {
        name: [
            Measured((MeanAttention(*row[3]), MeanAttention(*row[4])), MeanAttention(*row[5])) for row in kept["heads"]
        ]
        for name, kept in document["models"].items()
    }


def judge(word: Word, heads: Sequence[Measured], source: str, *, margin: float = 0.0) -> Judged:
    """Count how often the word is right: one half of the text by the other, or random ids by all of it."""
    strict = word.stricter(margin)
    if source == "text":
        pairs = [(one, other) for head in heads for one, other in (head.halves, head.halves[::-1])]
    else:
        pairs = [(head.ids, head.text) for head in heads]
    said = [truth for seen, truth in pairs if strict.holds(seen)]
    right, holds = sum(map(word.holds, said)), sum(word.holds(truth) for _, truth in pairs)
    return Judged(len(said), right, holds, len(pairs))


def left_out(word: Word, models: Models, source: str) -> dict[str, Judged]:
    """Judge the word on each model, with the margin that the others choose."""
    return {
        name: judge(word, heads, source, margin=0.0 if source == "text" else margin_of(word, _others(models, name)))
        for name, heads in models.items()
    }


def _others(models: Models, name: str) -> list[Measured]:
    return [head for other, heads in models.items() if other != name for head in heads]


def margin_of(word: Word, heads: Sequence[Measured]) -> float:
    """Choose the smallest margin at which random ids are right often enough on these heads; the largest if none is."""
    good = (margin for margin in MARGINS if judge(word, heads, "random ids", margin=margin).precision >= CHOSEN)
    return next(good, MARGINS[-1])


def total(judged: Mapping[str, Judged]) -> Judged:
    return sum(judged.values(), Judged(0, 0, 0, 0))


def interval(judged: Mapping[str, Judged]) -> tuple[float, float] | None:
    """95 % interval of the precision over models: whole models are drawn again, since heads of one are alike."""
    known = [one for one in judged.values() if one.said]
    if len(known) < FEWEST_MODELS:
        return None
    chance = random.Random(0)
    nothing = Judged(0, 0, 0, 0)
    draws = sorted(sum(chance.choices(known, k=len(known)), nothing).precision for _ in range(RESAMPLES))
    return draws[RESAMPLES // 40], draws[-1 - RESAMPLES // 40]


def may_be_said(judged: Mapping[str, Judged], *, fewest: int = FEWEST_HEADS) -> bool:
    """Apply the rule: enough heads in enough models, precision high and above the base rate."""
    models = sum(one.said > 0 for one in judged.values())
    whole = total(judged)
    is_precise = whole.precision >= max(ENOUGH, min(1.0, whole.base + BEYOND_BASE))
    return whole.said >= fewest and models >= FEWEST_MODELS and is_precise


def words_page(document: Json) -> str:
    """The tables of docs/evidence.md."""
    models = read_words(document)
    by_model = [models_table(models, source) for source in SOURCES]
    return "\n\n".join([words_table(models), *by_model, base_line(models)])


def words_table(models: Models) -> str:
    """Each word with its rule, its precision by source, its base rate, and the sources that may say it."""
    lines = [
        "| word | rule | text, other half | random ids | base rate | may be said from |",
        "|---|---|---|---|---|---|",
    ]
    for word in VOCABULARY:
        judged = {source: left_out(word, models, source) for source in SOURCES}
        said = [source for source in SOURCES if may_be_said(judged[source], fewest=FEWEST[source])]
        cells = [_with_interval(judged[source]) for source in SOURCES]
        base = f"{total(judged['random ids']).base:.0%}"
        lines.append(f"| {' | '.join([word.name, word.rule, *cells, base, ', '.join(said) or 'nothing'])} |")
    return "\n".join(lines)


def base_line(models: Models) -> str:
    """State how many heads look near and far anyway, for the words that `scan` says of estimates."""
    heads = [head for own in models.values() for head in own]
    near = sum(head.text.near >= HALF for head in heads) / len(heads)
    return (
        f"Of all heads {near:.0%} have at least half of their mass near: the base rate of *probably near*. "
        f"That of *probably far* is {1 - near:.0%}."
    )


def models_table(models: Models, source: str) -> str:
    """Each model as the one left out: how often words from this source were right there."""
    lines = [
        f"| {source}, model | heads | {' | '.join(word.name for word in VOCABULARY)} |",
        "|" + "---|" * (2 + len(VOCABULARY)),
    ]
    judged = [left_out(word, models, source) for word in VOCABULARY]
    for name, heads in models.items():
        lines.append(f"| {name} | {len(heads)} | {' | '.join(_share(one[name]) for one in judged)} |")
    return "\n".join(lines)


def unsaid_table(document: Json) -> str:
    """Words that are not said, with the numbers that forbid it: each half of the windows judges the other."""
    lines = [
        "| word | rule | other half | models with such heads | base rate | may be said |",
        "|---|---|---|---|---|---|",
    ]
    for column, (name, rule) in enumerate(UNSAID.items()):
        judged = {}
        for model, kept in document["models"].items():
            pairs = [pair for head in kept["heads"] for pair in (head[3 + column], head[3 + column][::-1])]
            said = [other >= UNSAID_LIMIT for one, other in pairs if one >= UNSAID_LIMIT]
            judged[model] = Judged(len(said), sum(said), sum(other >= UNSAID_LIMIT for _, other in pairs), len(pairs))
        found = [model for model, one in judged.items() if one.said]
        verdict = "yes" if may_be_said(judged, fewest=FEWEST["text"]) else "no"
        where = f"{len(found)} of {len(judged)}" + (f" ({', '.join(found)})" if found else "")
        share = f"{_share(total(judged))}"
        lines.append(f"| {name} | {rule} | {share} | {where} | {total(judged).base:.1%} | {verdict} |")
    return "\n".join(lines)


def reference(document: Json) -> dict[str, Json]:
    """Count the heads of every word on text, model by model: the table that the library ships."""
    models = read_words(document)
    return {
        name: {
            "block": document["models"][name]["heads"][0][0],
            "heads": len(heads),
            **{word.name: sum(word.holds(head.text) for head in heads) for word in VOCABULARY},
        }
        for name, heads in models.items()
    }


def _with_interval(judged: Mapping[str, Judged]) -> str:
    found = interval(judged)
    return _share(total(judged)) + (f" [{found[0]:.0%}, {found[1]:.0%}]" if found else "")


def _share(judged: Judged) -> str:
    return f"{judged.right} of {judged.said}" if judged.said else "–"
