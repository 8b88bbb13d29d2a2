"""Floors under a table of trained models: the losses of what needs no attention. Above them a null says nothing."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locater.records import Json
from locater.stabilisers import Stabiliser

from ..data.sources import Data
from .interventions import Temperature, Window

NONE, NO_CONTEXT, UNIFORM = "none", "no context", "uniform attention"
# Trained beside the other arms, on their seeds.
ARMS: dict[str, Callable[[nn.Module], Stabiliser]] = {
    NO_CONTEXT: lambda model: Window(model, 1),
    UNIFORM: lambda model: Temperature(model, 1e-6),
}
MARGIN = 0.05  # nats that `none` is to be below the bigram table, and uniform attention above `none`
WEIGHTS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # of the unigram in the bigram table, in counts
FLOOR_SEEDS = 2  # of the others' five: differences of 0.05 nats are far beyond those of seeds
HELD_OUT = 10  # a tenth of the training text chooses among them


def count_floors(data: Data, tokens: Int[Tensor, "texts length"], targets: Int[Tensor, "texts length"]) -> Json:
    """The loss of tables of single tokens and of pairs, counted from the whole training text."""
    if data.tokens is None:  # words are even, and the last says nothing of the next
        return dict.fromkeys(("unigram", "bigram"), math.log(int(targets.max()) + 1))
    singles, pairs = _tables(torch.from_numpy(data.tokens.train.astype("int64")), data.tokens.vocabulary.size)
    return {
        "unigram": -float(singles[targets].mean()),
        "bigram": -float(pairs[tokens, targets].mean()),
    }


def _tables(tokens: Int[Tensor, " length"], words: int) -> tuple[Float[Tensor, " words"], Float[Tensor, "words words"]]:
    """Logarithms of both; the weight of the unigram is the best on a tenth that was not counted."""
    cut = len(tokens) - len(tokens) // HELD_OUT
    before, after = tokens[cut:-1], tokens[cut + 1 :]
    weight = max(WEIGHTS, key=lambda weight: float(bigrams(tokens[:cut], words, weight)[before, after].mean()))
    return unigrams(tokens, words), bigrams(tokens, words, weight)


def unigrams(tokens: Int[Tensor, " length"], words: int) -> Float[Tensor, " words"]:
    """Log shares; every word is counted once more than it stands there."""
    return (torch.bincount(tokens, minlength=words).double() + 1).log() - torch.tensor(float(len(tokens) + words)).log()


def bigrams(tokens: Int[Tensor, " length"], words: int, weight: float) -> Float[Tensor, "words words"]:
    """Log shares of pairs; behind each word the unigram counts as `weight` more pairs."""
    counts = torch.bincount(tokens[:-1] * words + tokens[1:], minlength=words**2).view(words, words).double()
    shares = counts + weight * unigrams(tokens, words).exp()
    return (shares / (counts.sum(1, keepdim=True) + weight)).log()


class Floors(NamedTuple):
    """Mean losses over seeds of one condition; None where they were not measured."""

    condition: str
    none: float
    unigram: float | None
    bigram: float | None
    no_context: float | None
    uniform: float | None

    @property
    def shortfall(self) -> str:
        """The reason why nothing can be concluded here; empty where the floors are beaten."""
        if self.bigram is None or self.uniform is None:
            return "the bigram table and uniform attention were not measured"
        reasons = []
        if self.none > self.bigram - MARGIN:
            reasons.append(f"`none` has {self.none:.3f}, a bigram table {self.bigram:.3f}")
        if self.uniform < self.none + MARGIN:
            reasons.append(f"uniform attention has {self.uniform:.3f}, `none` {self.none:.3f}")
        return " and ".join(reasons)

    def __str__(self) -> str:
        known = {"unigram": self.unigram, "bigram": self.bigram, NO_CONTEXT: self.no_context, UNIFORM: self.uniform}
        parts = [f"{name} {value:.3f}" for name, value in (known | {"`none`": self.none}).items() if value is not None]
        return (f"{self.condition}: " if self.condition else "") + ", ".join(parts)


def floors(rows: Sequence[Json]) -> list[Floors]:
    """Condition by condition, from the rows of `none`, of the floors' arms, and the tables counted beside them."""
    found = []
    for condition in dict.fromkeys(row["condition"] for row in rows):
        some = [row for row in rows if row["condition"] == condition]
        none = [row for row in some if row["arm"] == NONE]
        if none:
            tables = (_mean(none, name) for name in ("unigram", "bigram"))
            arms = (_mean([row for row in some if row["arm"] == arm], "best_loss") for arm in ARMS)
            found.append(Floors(condition, fmean(row["best_loss"] for row in none), *tables, *arms))
    return found


def _mean(rows: Sequence[Json], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else None
