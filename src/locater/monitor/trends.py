"""Growth of numbers from report to report: rates per step, and how many steps are left to a threshold."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..records import State
from .report import LayerReport

KEPT = 3  # reports whose numbers are remembered
LEAST = 0.25  # of a threshold; below, growth is not yet spoken of
SPAN = 50  # steps that the remembered reports must span: over fewer, one batch differs from the next
FARTHEST = 2  # times that span is how far ahead a forecast may be: beyond, it is a guess
SETTLED = 1000  # steps in which a head that learns anything has told keys apart
LEARNED = 0.95  # normalised entropy of the median head below: the model is not at its start, where it is about 0.99
GROWING = ("max_logit", "eta", "sigma_1")

Moment = tuple[int, dict[str, list[float]]]


@dataclass
class Trends:
    """The last few reports' numbers of every layer's heads, in training."""

    moments: dict[str, list[Moment]] = field(default_factory=dict)
    due: dict[str, tuple[float, float]] = field(default_factory=dict)  # forecasts by head: the step, and the limit
    num_true: int = 0
    num_wrong: int = 0

    def promise(self, layer: LayerReport, steps: dict[int, float], limit: float) -> None:
        """Note forecasts, the first of each head, to be judged when they are due, at twice the time that was said."""
        now = self.moments[_key(layer)][-1][0]
        for head, ahead in steps.items():
            self.due.setdefault(f"{_key(layer)} {head}", (now + 2 * ahead, limit))

    def _judge(self, step: int, layer: LayerReport) -> None:
        for head, largest in zip(layer.heads, layer.statistics["max_logit"], strict=True):
            due, limit = self.due.get(f"{_key(layer)} {head}", (math.inf, math.inf))
            if largest > limit or step >= due:
                self.num_true += largest > limit
                self.num_wrong += not largest > limit
                del self.due[f"{_key(layer)} {head}"]

    def record(self) -> str:
        """Say how many forecasts that came due have come true, where any did come due."""
        num_due = self.num_true + self.num_wrong
        return f" ({self.num_true} of {num_due} such forecasts came true so far)" if num_due else ""

    def add(self, step: int, layers: Iterable[LayerReport]) -> None:
        for layer in layers:
            self._judge(step, layer)
            known = {**layer.statistics, **layer.weights}
            kept = self.moments.setdefault(_key(layer), [])
            if not kept or kept[-1][0] < step:
                kept.append((step, {name: list(known[name]) for name in GROWING if name in known}))
            del kept[:-KEPT]

    def growth(self, layer: LayerReport, name: str) -> list[float]:
        """Per head (log now − log before) / steps between the last two reports; NaN where that is not defined."""
        kept = [moment for moment in self.moments.get(_key(layer), []) if name in moment[1]][-2:]
        if len(kept) < 2:
            return [math.nan] * len(layer.heads)
        (before, old), (now, new) = kept
        pairs = zip(new[name], old[name], strict=True)
        return [math.log(b / a) / (now - before) if a > 0 and b > 0 else math.nan for b, a in pairs]

    def steps_until(self, layer: LayerReport, name: str, limit: float, *, within: int) -> dict[int, float]:
        """Heads that grew in every report remembered and will pass the limit this soon, and when."""
        kept = [moment for moment in self.moments.get(_key(layer), []) if name in moment[1]]
        span = kept[-1][0] - kept[0][0] if kept else 0
        if len(kept) < KEPT or span < SPAN:
            return {}
        found, within = {}, min(within, FARTHEST * span)
        for position, (head, rate) in enumerate(zip(layer.heads, self.growth(layer, name), strict=True)):
            values = [values[name][position] for _, values in kept]
            if all(a < b for a, b in zip(values, values[1:], strict=False)) and limit > values[-1] > LEAST * limit:
                steps = math.log(limit / values[-1]) / rate
                found |= {head: steps} if steps <= within else {}
        return found

    def is_fast(self, layer: LayerReport, name: str, heads: Iterable[Any]) -> bool:
        """Tell whether a head grows more than tenfold in 100 steps: no slow drift, but steps that are too large."""
        rates = dict(zip(layer.heads, self.growth(layer, name), strict=True))
        return any(100 * rates[head] > math.log(10) for head in heads)

    def words(self, layer: LayerReport, name: str, heads: list[Any]) -> str:
        rates = dict(zip(layer.heads, self.growth(layer, name), strict=True))
        known = [rates[head] for head in heads if not math.isnan(rates[head])]
        fastest = max(known, default=0.0)
        if self.is_fast(layer, name, heads):
            return "growing more than tenfold in 100 steps"
        return f"growing by {math.expm1(100 * fastest):+.0%} in 100 steps" if fastest > 0 else ""

    def state_dict(self) -> State:
        return {"moments": self.moments, "due": self.due, "record": [self.num_true, self.num_wrong]}

    def load_state_dict(self, state: State) -> None:
        self.moments = {key: [(step, values) for step, values in kept] for key, kept in state["moments"].items()}
        self.due = {key: (due, limit) for key, (due, limit) in state.get("due", {}).items()}
        self.num_true, self.num_wrong = state.get("record", (0, 0))


@dataclass
class Awake:
    """Heads that have ever told keys apart: at its start a model's logits are nearly equal, and nothing is wrong.

    A head is dead that did before, that has not done so for SETTLED steps, or that stands among others that do.
    """

    first: int | None = None
    ever: dict[str, list[int]] = field(default_factory=dict)
    others: float = math.nan  # the median head's normalised entropy

    def add(self, step: int, layers: Sequence[LayerReport], limit: float | None) -> None:
        self.first = step if self.first is None else self.first
        known = [value for layer in layers for value in layer.statistics["normalised_entropy"] if value == value]
        self.others = median(known) if known else math.nan
        if limit is None:
            return
        for layer in layers:
            heads = zip(layer.heads, layer.statistics["normalised_entropy"], strict=True)
            told = {head for head, value in heads if value <= limit}
            self.ever[_key(layer)] = sorted(told | {*self.ever.get(_key(layer), ())})

    def may_begin(self, layer: LayerReport, head: int | None, step: int) -> bool:
        """Tell whether this head may simply not have learned anything yet."""
        settled = self.first is not None and step - self.first >= SETTLED
        return not (settled or self.others < LEARNED or head in self.ever.get(_key(layer), ()))

    def state_dict(self) -> State:
        return {"first": self.first, "ever": self.ever}

    def load_state_dict(self, state: State) -> None:
        self.first, self.ever = state["first"], {key: list(heads) for key, heads in state["ever"].items()}


def _key(layer: LayerReport) -> str:
    return f"{layer.block} {layer.layer}"
