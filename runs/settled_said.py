"""What is said of the outcome of runs/settled.py: the README's honest limit, and the advice of docs/studies.md."""

import math
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

from locater_lab.studies.statistics import FEWEST, MeanEstimate

ARMS = {"held": "κ held", "released": "κ released", "decay": "weight decay on queries and keys"}
LIMIT = "**An honest limit.** "
COLUMNS = 120
SMALL_RATIO = "0.949 [0.918, 0.981]"  # of `held` in runs/candidates.py
TUNED, UNTUNED = "each arm at its own best rate", "rate not tuned"
TUNED_SHORTER = "rates tuned at 10,000 steps"
NOW = "If it diverges: `RollBack(0.2)`."


class Ratio(NamedTuple):
    """A ratio with its interval, from a paired difference of logarithms."""

    estimate: MeanEstimate

    @property
    def is_claimed(self) -> bool:
        return self.estimate.count >= FEWEST

    @property
    def word(self) -> str:
        return "" if not self.estimate.is_seen else "lower" if self.estimate.value < 0 else "higher"

    @property
    def said(self) -> str:
        """The word in a sentence; an interval that leaves out 1 only as long as it is taken alone is not enough."""
        if self.word:
            return {"lower": "it leads", "higher": "it is behind"}[self.word]
        is_outside = self.estimate.low > 0 or self.estimate.high < 0
        return "a lead is not sure" if is_outside and self.estimate.value < 0 else "no lead is seen"

    @property
    def shown_p(self) -> str:
        """What is left of p after Holm's correction, where the interval alone would mislead."""
        return f", p = {self.estimate.adjusted:.2g} for two forms" if self.said == "a lead is not sure" else ""

    def __str__(self) -> str:
        one = self.estimate
        if not self.is_claimed or math.isinf(one.low):
            return "too few seeds" if one.count else "–"
        ends = [math.exp(part) for part in (one.value, one.low, one.high)]
        places = 3 if all(abs(part - 1) > 0.0005 for part in ends[1:]) else 4  # on which side of 1 it is, is to be seen
        value, low, high = (f"{part:.{places}f}" for part in ends)
        return f"{value} [{low}, {high}]"


EARLY, NOT_SURE = "Only early", "Early, and at the end not sure"


class Outcome(NamedTuple):
    """Yes, early (only then, or not sure at the end) or no; empty where no form of LocAteR has three seeds.

    By form, the ratios that it rests on.
    """

    word: str = ""
    ends: Mapping[str, Ratio] = {}  # of perplexities at the end
    early: Mapping[str, Ratio] = {}  # of steps to an early loss of `none`
    how: str = ""  # rates were found

    @property
    def answer(self) -> str:
        """The word, with what it is conditional on."""
        return f"{self.word}, at one rate" if self.word and self.how == UNTUNED else self.word

    @property
    def best(self) -> str:
        return min(self.ends, key=lambda arm: self.ends[arm].estimate.value)


NOTHING = Outcome()


def limit(end: Outcome, longer: Outcome = NOTHING, words: Outcome = NOTHING) -> str:
    """The README's paragraph on the gain: plain words first, then the ratios of perplexity.

    `longer` is the outcome with twice the steps, `words` that with whole words.
    """
    numbers = [f"As [ratios](docs/reproduction.md): {SMALL_RATIO} in the small model."]
    numbers += [_ratio(*told) for told in (("On WikiText-2", end), ("With twice the steps", longer)) if told[1].word]
    numbers += [_ratio("With whole words", words)] if words.word else []
    return _filled(" ".join([f"{LIMIT}{_plainly(end, longer)}", *numbers, NOW]), COLUMNS)


def _ratio(where: str, found: Outcome) -> str:
    ratio = found.ends[found.best]
    how = "" if found.how == TUNED else f", {found.how}"
    return f"{where}: {ratio} ({ratio.estimate.count} seeds{ratio.shown_p}{how})."


def _plainly(end: Outcome, longer: Outcome) -> str:
    """The gain in per cent, with its baseline and no letter of the theory."""
    less = 100 * (1 - float(SMALL_RATIO.split()[0]))
    small = f"In a small model LocAteR ends {less:.0f} % lower in perplexity than without it, as QK-norm does."
    if not end.word:
        return f"{small} Whether it still leads at the end of training on WikiText-2 is not settled."
    early = {EARLY: ", and it leads only early", NOT_SURE: ", and it leads early"}.get(end.word, "")
    told = f"{small} On WikiText-2 it {_ends(end)}{early}."
    return f"{told} With twice the steps it {_ends(longer)}." if longer.word else told


def _ends(found: Outcome) -> str:
    ratio = found.ends[found.best]
    percent = 100 * (math.exp(ratio.estimate.value) - 1)
    if round(abs(percent), 1) == 0:
        return "ends level"
    chance = "" if ratio.word else ", which may be chance"
    return f"ends {abs(percent):.1f} % {'lower' if percent < 0 else 'higher'}{chance}"


SMALL = "[a small model](reproduction.md#where-attention-matters)"
END_LINK = "[the end of training](reproduction.md#at-the-end-of-training)"
FORMS = {"held": "hold κ through it", "released": "let κ go to 0 by a quarter of it"}
LINES = (
    "- In a short run, or one that is stopped early: hold κ, and try a rate 1.4 times yours. {small} ended at {ratio} "
    "of the perplexity; QK-norm did as well.",
    "- In a long run that is stable: {long}.",
    "- Where logits grow: QK-Clip or QK-norm; in a run that diverges now, `RollBack(0.2)` ([why](stabilisers.md)).",
)


def advice(end: Outcome, longer: Outcome = NOTHING) -> str:
    """Which LocAteR to use today, in three lines, as far as the runs have settled it."""
    small = SMALL[0] + SMALL[1].upper() + SMALL[2:]
    told = "\n".join(LINES).format(small=small, ratio=SMALL_RATIO, long=_in_a_long_run(end, longer))
    return textwrap.indent(told, "    ")


def _in_a_long_run(end: Outcome, longer: Outcome) -> str:
    """By the longest of the runs that make a claim."""
    told = [(found, where) for found, where in ((end, ""), (longer, "with twice the steps ")) if found.word]
    if not told:
        return f"none, at {END_LINK} no gain has been shown yet"
    last, _ = told[-1]
    ratios = [(found.ends[found.best], where) for found, where in told]
    shown = "; ".join(f"{where}{ratio} ({ratio.estimate.count} seeds{ratio.shown_p})" for ratio, where in ratios)
    use = FORMS[last.best] if last.word == "Yes" else "none"
    return f"{use}, at {END_LINK} {ratios[-1][0].said}: {shown}"


def _filled(text: str, columns: int) -> str:
    return textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
