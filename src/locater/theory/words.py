"""The words of the theory for the shape of a profile; needs no torch, so that reports and the command line share them.

They speak of the random walk alone: what a trained head does with its inputs is another question.
"""

from typing import NamedTuple


class Word(NamedTuple):
    """One regime: its name in narrow columns, its letter on a map, its colour on a page, its meaning in a sentence."""

    short: str
    letter: str
    colour: str  # colours that stay apart in print and for colour-blind readers (after Okabe and Ito)
    meaning: str


WORDS: dict[str, Word] = {
    "early": Word("early", "E", "#56B4E9", "the first tokens pass on their signal, recent ones do not"),
    "middle": Word("mid", "M", "#F0B429", "only a window in the middle of the context passes on its signal"),
    "late": Word("late", "L", "#009E73", "recent tokens pass on their signal, early ones do not"),
    "uniform": Word(
        "unif",
        "·",
        "#e8e4da",
        "every token passes on its signal with about the same probability: attention does not select",
    ),
    "mixed": Word("mixed", "x", "#b9b3a4", "tokens differ, but no single stretch of the context stands out"),
    "no-signal": Word(
        "none", " ", "#3b3b3b", "almost no token passes on a signal: the gradient through attention vanishes"
    ),
}
REGIMES = tuple(WORDS)
LOCALIZED = ("early", "middle", "late")
