"""Every number of a head, once: symbol, heading, words, what high and low mean, digits.

Terminal, page, alarms and documentation take them from here; needs no torch.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

THEORY = "the paper's random walk of tokens, not a text"
WEIGHTS = "the weights alone"
ESTIMATE = "an estimate from the weights, not a measurement"
PREDICTED = "a prediction from weights and single tokens of a text"
MEASURED = "a measurement on text"
STEPS = "the weights at two reports"
NEAR = 16  # keys counted as near the query, itself included
FIRST_QUERY = 64  # earlier queries have few keys: nearly all of them are near


@dataclass(frozen=True)
class Quantity:
    """One column; `scale` is "sequential", "diverging" around zero, or "share" for numbers from 0 to 1.

    `short` heads a column of a terminal, where the symbol does not; `digits` formats a number there.
    """

    name: str
    symbol: str
    words: str
    low: str
    high: str
    scale: str = "sequential"
    basis: str = WEIGHTS
    short: str = ""
    digits: str = "#.3g"  # zeros at the end are kept: a column has one number of digits

    @property
    def heading(self) -> str:
        return self.short or self.symbol

    def text(self, value: float) -> str:
        """
        >>> quantity("xi").text(0.123456)
        '0.12'
        >>> quantity("sigma").text(1.0), quantity("sigma").text(123.4)
        ('1.00', '123')
        """
        return f"{value:{self.digits}}".removesuffix(".")

    def to_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "short"}


_ATTENTION = (
    Quantity(
        "normalised_entropy", "entropy", "how evenly attention is spread", "on one token", "over all tokens alike",
        "share", MEASURED, digits=".3f",
    ),
    Quantity(
        "near_mass", "near", f"share of attention on the {NEAR} nearest tokens", "looks far", "looks near",
        "share", MEASURED, digits=".3f",
    ),
    Quantity(
        "near_mass_beyond_first", "near", f"share of attention on the {NEAR} nearest tokens, first token excluded",
        "looks far", "looks near", "share", MEASURED, digits=".3f",
    ),
    Quantity(
        "sink_mass", "sink", "share of attention on the first token", "no sink", "all on the first token",
        "share", MEASURED, digits=".3f",
    ),
    Quantity(
        "mean_distance", "distance", "mean distance of what is attended to, in tokens", "near", "far",
        basis=MEASURED, digits=".1f",
    ),
    Quantity("max_logit", "max ω", "largest logit seen", "small logits", "large logits", basis=MEASURED),
    Quantity("participation", "1/Σp²", "number of tokens that share the attention", "one", "many", basis=MEASURED),
    Quantity("entropy", "entropy (nats)", "entropy of attention, in nats", "on one token", "over many", basis=MEASURED),
)  # fmt: skip
_SIDES = (("measured", MEASURED), ("predicted", PREDICTED), ("estimated", ESTIMATE))


def _on_side(one: Quantity, side: str, basis: str) -> Quantity:
    """The same number as it was measured, predicted or estimated."""
    is_guess = side == "estimated"
    words = f"{one.words}{', first token excluded' * (is_guess and one.name == 'near_mass')}, {side}"
    symbol = f"{one.heading}?" if is_guess else f"{one.symbol} {side}"
    named = dict(name=f"{side}_{one.name}", symbol=symbol, words=words, basis=basis)
    return replace(one, **named, short="", digits=".2f" if is_guess else one.digits)


QUANTITIES = {
    one.name: one
    for one in (
        Quantity(
            "xi", "ξ", "trace of W over its scale", "negative: localizes", "positive: localizes",
            "diverging", digits=".2f",
        ),
        Quantity(
            "eta_over_temperature", "η/λ", "scale of W over the temperature", "tokens look alike",
            "large logits",
        ),
        Quantity(
            "trace_over_temperature", "tr W/λ", "sum of the eigenvalues over the temperature", "unlike tokens attract",
            "like tokens attract", "diverging",
        ),
        Quantity(
            "localisation", "L", "share of the context that the theory leaves out", "hears every token",
            "hears few tokens", "share", THEORY, short="local", digits=".2f",
        ),
        Quantity(
            "symmetry", "tr W²/‖W‖²", "how symmetric W is", "rotates (−1)", "symmetric (1)", "diverging"
        ),
        Quantity(
            "spread", "E|μ−m|²", "variance of all d eigenvalues μ, zeros too, about their mean", "concentrated",
            "spread out",
        ),
        Quantity("sigma", "σ₁", "largest singular value of W", "small logits", "large logits"),
        Quantity("logit_bound", "|ω| ≤", "what no logit of the head can exceed", "bounded closely", "hardly bounded"),
        *_ATTENTION,
        *(_on_side(one, side, basis) for side, basis in _SIDES for one in _ATTENTION),
        Quantity("eta", "η", "scale of W", "tokens look alike", "logits run hot"),
        Quantity(
            "trace", "tr W", "sum of the eigenvalues", "unlike tokens attract", "like tokens attract", "diverging"
        ),
        Quantity(
            "update_ratio", "‖ΔW‖/‖W‖", "how much W changed since the last report", "at rest", "changes fast",
            basis=STEPS,
        ),
        Quantity(
            "update_stable_rank", "rank ΔW", "number of directions in which W changed", "one direction", "many",
            basis=STEPS,
        ),
        Quantity(
            "update_entropy", "H(ΔW)", "how evenly the change of W is spread over directions", "one direction",
            "all alike", "share", STEPS,
        ),
        Quantity(
            "max_logit_growth", "max ω ↑", "growth of the largest logit in a step, as a share", "falls", "grows",
            "diverging", MEASURED,
        ),
        Quantity("eta_growth", "η ↑", "growth of η in a step, as a share", "falls", "grows", "diverging", STEPS),
        Quantity("sigma_1_growth", "σ₁ ↑", "growth of σ₁ in a step, as a share", "falls", "grows", "diverging", STEPS),
        Quantity("moved", "moved", "how far the spectrum went from first to last, over η", "unchanged", "another head"),
    )
}  # fmt: skip


# Parts of other columns: copied and filtered by, but not shown beside what they come to.
RAW = frozenset(
    ["trace_of_square", "frobenius_squared", "mean", "variance", "mean_nonzero", "variance_nonzero", "temperature"]
)
SCALED = frozenset(["eta", "trace"])  # the same, where the ratio to the temperature is there


def is_shown(name: str, columns: Collection[str]) -> bool:
    """Tell whether a column is shown by itself on a page that has these columns."""
    return name not in RAW and not (name in SCALED and f"{name}_over_temperature" in columns)


def quantity(name: str) -> Quantity:
    """The row of a column; one that is not in the table speaks for itself.

    >>> quantity("key_norm").words
    'key norm'
    """
    words = name.replace("_", " ")
    return QUANTITIES.get(name) or Quantity(name, words, words, "low", "high")


GLOSSARY = {
    "head": "one query-key pair of weights in a layer; it decides which earlier tokens a token looks at",
    "W": "W_K^T W_Q, the head's query-key matrix: the logit of key t for the query T is x_t·W x_T/λ",
    "λ": "temperature: what logits are divided by, as a rule the square root of the head's width",
    "eigenvalues": "the numbers by which W stretches its own directions; complex where W rotates",
    "tr W": "sum of the eigenvalues: how strongly like tokens attract each other",
    "η": "scale of W, √((tr W² + 2‖W‖²)/3): how large logits become",
    "ξ": "tr W/η: trace over scale; far from zero, the theory's signal is localized",
    "ρ_t": "the chance that a gradient passes through token t's weight, not that the token is attended to",
    "L": "localisation: the share of the context left out, 0 for an even profile, near 1 for a single token",
    "regime": "the shape of ρ over the context in one word",
    "T, t": "number of tokens in the context; a token of it, counted from 1",
    "Δ": "distance: query position minus key position",
    "entropy": "how evenly attention is spread, 1 for all tokens alike, 0 for one token",
    "near mass": f"share of the attention on the {NEAR} nearest tokens, the first token excluded",
    "sink": "the first token, on which many heads rest when they have nothing to say",
    "entropy collapse": "attention so peaked that learning stalls",
    "rank collapse": "attention so even that all tokens become alike",
    "LocAteR": "the paper's regulariser: it shrinks the scale η; tr W is free unless you hold it",
}


class Regime(NamedTuple):
    """A shape of the theory's profiles: its name in narrow columns, letter on a map, colour on a page, and meaning."""

    short: str
    letter: str
    colour: str  # colours that stay apart in print and for colour-blind readers (after Okabe and Ito)
    meaning: str


REGIME_WORDS: dict[str, Regime] = {
    "early": Regime("early", "E", "#56B4E9", "the first tokens pass on their signal, recent ones do not"),
    "middle": Regime("mid", "M", "#F0B429", "only a window in the middle of the context passes on its signal"),
    "late": Regime("late", "L", "#009E73", "recent tokens pass on their signal, early ones do not"),
    "uniform": Regime(
        "unif",
        "·",
        "#e8e4da",
        "every token passes on its signal with about the same probability: attention does not select",
    ),
    "mixed": Regime("mixed", "x", "#b9b3a4", "tokens differ, but no single stretch of the context stands out"),
    "no-signal": Regime(
        "none", " ", "#3b3b3b", "almost no token passes on a signal: the gradient through attention vanishes"
    ),
}
REGIMES = tuple(REGIME_WORDS)
LOCALIZED = ("early", "middle", "late")
