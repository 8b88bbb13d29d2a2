"""How fast numbers grow from report to report: rates per step, and how many steps are left to a threshold."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..records import State
from .report import LayerReport

KEPT = 3  # reports whose numbers are remembered
LEAST = 0.25  # of a threshold; below, growth is not yet spoken of
SPAN = 50  # steps that the remembered reports must span: over fewer, one batch differs from the next
GROWING = ("max_logit", "eta", "sigma_1")

Moment = tuple[int, dict[str, list[float]]]


@dataclass
class Trends:
    """The last few reports' numbers of every layer's heads, in training."""

    moments: dict[str, list[Moment]] = field(default_factory=dict)

    def add(self, step: int, layers: Iterable[LayerReport]) -> None:
        for layer in layers:
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
        if len(kept) < KEPT or kept[-1][0] - kept[0][0] < SPAN:
            return {}
        found = {}
        for position, (head, rate) in enumerate(zip(layer.heads, self.growth(layer, name), strict=True)):
            values = [values[name][position] for _, values in kept]
            if all(a < b for a, b in zip(values, values[1:], strict=False)) and limit > values[-1] > LEAST * limit:
                steps = math.log(limit / values[-1]) / rate
                found |= {head: steps} if steps <= within else {}
        return found

    def words(self, layer: LayerReport, name: str, heads: list[Any]) -> str:
        rates = dict(zip(layer.heads, self.growth(layer, name), strict=True))
        known = [rates[head] for head in heads if not math.isnan(rates[head])]
        fastest = max(known, default=0.0)
        if 100 * fastest > math.log(10):
            return "growing more than tenfold in 100 steps"
        return f"growing by {math.expm1(100 * fastest):+.0%} in 100 steps" if fastest > 0 else ""

    def state_dict(self) -> State:
        return {"moments": self.moments}

    def load_state_dict(self, state: State) -> None:
        self.moments = {key: [(step, values) for step, values in kept] for key, kept in state["moments"].items()}


def _key(layer: LayerReport) -> str:
    return f"{layer.block} {layer.layer}"
