"""Differences and correlations with their uncertainty, and the words that they allow; knows no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

LEVEL = 0.95
# Fewer pairs than this make no claim, whatever their interval.
FEWEST = 3


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; `count` is of pairs, or of points, and `p` that of no difference."""

    value: float
    low: float
    high: float
    p: float
    count: int

    @property
    def is_seen(self) -> bool:
        """Whether the interval leaves out zero, and enough stand behind it."""
        return self.count >= FEWEST and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        return f"{self.value:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    """Mean difference over the seeds that both have, with Student's interval of its pairs.

    Nothing is assumed of what two seeds share, only that differences of seeds are alike. One pair has no interval.
    """
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if len(differences) < 2:
        return Estimate(differences[0] if differences else math.nan, -math.inf, math.inf, 1.0, len(differences))
    from scipy.stats import t

    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    free = len(differences) - 1
    half = float(t.ppf((1 + LEVEL) / 2, free)) * error
    p = 2 * float(t.sf(abs(mean) / error, free)) if error else float(mean == 0)
    return Estimate(mean, mean - half, mean + half, p, len(differences))


def spearman(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """Rank correlation with the interval of Fisher's z, widened for ranks (Bonett and Wright 2000)."""
    from scipy.stats import norm, spearmanr

    if len(x) < 4 or len(set(x)) == 1 or len(set(y)) == 1:
        return Estimate(math.nan, -1.0, 1.0, 1.0, len(x))
    found = spearmanr(x, y)
    value = max(-0.999999, min(0.999999, float(found.statistic)))  # type: ignore
    error = math.sqrt((1 + value**2 / 2) / (len(x) - 3))
    half = float(norm.ppf((1 + LEVEL) / 2)) * error
    low, high = (math.tanh(math.atanh(value) + side * half) for side in (-1, 1))
    return Estimate(value, low, high, float(found.pvalue), len(x))  # type: ignore


def holm(estimates: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Each with p corrected for how many were compared (Holm 1979); an interval that this unmakes takes in 0."""
    corrected: dict[str, Estimate] = {}
    highest = 0.0
    ordered = sorted(estimates.items(), key=lambda item: item[1].p)
    for place, (name, one) in enumerate(ordered):
        highest = max(highest, min(1.0, one.p * (len(ordered) - place)))
        widened = one if highest < 1 - LEVEL else replace(one, low=min(one.low, 0.0), high=max(one.high, 0.0))
        corrected[name] = replace(widened, p=highest)
    return {name: corrected[name] for name in estimates}


def compared(name: str, against: str, what: str, found: Estimate) -> str:
    """One sentence: lower, higher, or no difference seen."""
    if not found.count:
        return f"{name} and {against} have no seed in common."
    if found.count < FEWEST:
        seeds = "one seed" if found.count == 1 else f"{found.count} seeds"
        return f"{what} of {name} − {against}: {found.value:+.3g} on {seeds}, too few to claim a difference."
    verdict = ("lower" if found.value < 0 else "higher") if found.is_seen else "no difference seen"
    return f"{what} of {name} − {against}: {found} ({found.count} seeds, paired, 95 %): {verdict}."


def correlated(x: str, y: str, found: Estimate) -> str:
    """One sentence: rises, falls, or no relation seen."""
    if math.isnan(found.value):
        return f"{y} over {x}: too few points, or no variation, to tell."
    verdict = ("rises" if found.value > 0 else "falls") if found.is_seen else "no relation seen"
    interval = f"[{found.low:+.2f}, {found.high:+.2f}]"
    return f"{y} over {x}: Spearman {found.value:+.2f} {interval} ({found.count} points, 95 %): {verdict}."
