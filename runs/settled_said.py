"""What is said of the outcome of runs/settled.py: the README's honest limit, and the advice of docs/studies.md."""

import math
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from locater_lab.studies.statistics import FEWEST, Estimate

ARMS = {"held": "κ held", "released": "κ released", "decay": "weight decay on queries and keys"}
LIMIT = "**An honest limit.** "
COLUMNS = 120
SMALL_RATIO = "0.949 [0.918, 0.981]"  # of `held` in runs/candidates.py


class Ratio(NamedTuple):
    """A ratio with its interval, from a paired difference of logarithms."""

    estimate: Estimate

    @property
    def is_claimed(self) -> bool:
        return self.estimate.count >= FEWEST

    @property
    def word(self) -> str:
        return "" if not self.estimate.is_seen else "lower" if self.estimate.value < 0 else "higher"

    def __str__(self) -> str:
        one = self.estimate
        if not self.is_claimed or math.isinf(one.low):
            return "too few seeds" if one.count else "–"
        value, low, high = (f"{math.exp(part):.3f}" for part in (one.value, one.low, one.high))
        return f"{value} [{low}, {high}]"


Ends = Mapping[str, Ratio]  # of the forms of LocAteR, at the end of training


def best(ends: Ends) -> str:
    return min(ends, key=lambda arm: ends[arm].estimate.value)


def claim(word: str, ends: Ends) -> str:
    """The README's sentence."""
    if not word:
        return "Whether it still leads at the end of training is not settled."
    ratio = ends[arm := best(ends)]
    words = {"lower": "it leads", "higher": "it is behind", "": "no lead is seen"}[ratio.word]
    early = "Its lead is an early one; at" if word == "Only early" else "At"
    count = f"{ratio.estimate.count} seeds"
    return f"{early} the end of training on WikiText-2 {words}: {ratio} with {ARMS[arm]} ({count})."


def limit(word: str, ends: Ends) -> str:
    """The README's paragraph around it."""
    text = (
        f"{LIMIT}In a small model LocAteR ends at {SMALL_RATIO} of the perplexity, as QK-norm does. "
        f"{claim(word, ends)} [All of it](docs/reproduction.md). "
        "For a run that diverges now, take `RollBack`, QK-Clip or QK-norm first."
    )
    return _filled(text, COLUMNS)


SMALL = "[in a small model](reproduction.md#where-attention-matters)"
END_LINK = "[the end of training](reproduction.md#at-the-end-of-training)"
FORMS = {"held": "Hold κ through the run", "released": "Let κ go to 0 by a quarter of the run"}


def advice(word: str, ends: Ends) -> str:
    """Which LocAteR to use today, as far as the runs have settled it."""
    at_small = f"{SMALL} that ended at {SMALL_RATIO} of the perplexity, as QK-norm did"
    hold = f"Hold κ, and try a rate 1.4 times yours: {at_small}"
    now = "QK-Clip or QK-norm, if logits grow now."
    if not word:
        return _box(f"{hold}. {now} At {END_LINK} no gain has been shown yet.")
    ratio, form = ends[best(ends)], FORMS[best(ends)]
    shown = f"{ratio} of the perplexity over {ratio.estimate.count} seeds"
    if word == "Yes":
        return _box(f"{form}: at {END_LINK} {shown}. A high rate gains more from it: {at_small}. {now}")
    nothing = "it is behind" if ratio.word == "higher" else "no lead is seen"
    if word == "Only early":
        return _box(f"{hold}, in a run that is stopped early: at {END_LINK} {nothing} ({shown}). {now}")
    return _box(f"None, in a long run that is stable: at {END_LINK} {nothing} ({shown}). In a short one: {hold}. {now}")


def _box(text: str) -> str:
    return textwrap.indent(_filled(text, COLUMNS - 4), "    ")


def _filled(text: str, columns: int) -> str:
    return textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
