"""Differences and correlations with their uncertainty, and the words that they allow; knows no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from ..records import Json

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


def pooled(estimates: Sequence[Estimate]) -> Estimate:
    """Rank correlations of several seeds as one: the mean of Fisher's z, each with its own error, seeds apart.

    Seeds that agree to the last rank do not make it certain: the error is that of so few points.
    """
    from scipy.stats import norm

    known = [one for one in estimates if not math.isnan(one.value) and one.count > 3]
    if not known:
        return Estimate(math.nan, -1.0, 1.0, 1.0, 0)
    values = [max(-0.999, min(0.999, one.value)) for one in known]
    z = fmean(map(math.atanh, values))
    squares = [(1 + value**2 / 2) / (one.count - 3) for value, one in zip(values, known, strict=True)]
    error = math.sqrt(sum(squares)) / len(known)
    half = float(norm.ppf((1 + LEVEL) / 2)) * error
    p = 2 * float(norm.sf(abs(z) / error))
    return Estimate(math.tanh(z), math.tanh(z - half), math.tanh(z + half), p, sum(one.count for one in known))


def wilson(count: int, total: int) -> tuple[float, float]:
    """The interval of a share (Wilson 1927).

    >>> [round(end, 2) for end in wilson(9, 10)]
    [0.6, 0.98]
    """
    if not total:
        return 0.0, 1.0
    from scipy.stats import norm

    z, share = float(norm.ppf((1 + LEVEL) / 2)), count / total
    middle, half = share + z**2 / (2 * total), z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return (middle - half) / (1 + z**2 / total), (middle + half) / (1 + z**2 / total)


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


@dataclass(frozen=True)
class Finding:
    """One comparison: `what` was looked at, `of` whom (with whom it is compared), and what its interval allows to say.

    Of `kind` "difference" it is paired by seed, of "relation" it is a rank correlation over points.
    """

    what: str
    of: str
    estimate: Estimate
    kind: Literal["difference", "relation"] = "difference"

    @property
    def verdict(self) -> str:
        one = self.estimate
        if self.kind == "relation":
            if math.isnan(one.value):
                return "too few points, or no variation"
            return ("rises" if one.value > 0 else "falls") if one.is_seen else "no relation seen"
        if one.count < FEWEST:
            return "too few seeds"
        return ("lower" if one.value < 0 else "higher") if one.is_seen else "no difference seen"

    def __str__(self) -> str:
        return f"{self.of} ({self.estimate})"

    def to_json(self) -> Json:
        one = self.estimate
        numbers = {name: getattr(one, name) if math.isfinite(getattr(one, name)) else None for name in NUMBERS}
        return {
            "what": self.what,
            "of": self.of,
            "kind": self.kind,
            "count": one.count,
            "verdict": self.verdict,
        } | numbers


NUMBERS = ("value", "low", "high", "p")


NULLS = {"no difference seen": "not seen to differ", "no relation seen": "shows no relation"}


def corrected(findings: Sequence[Finding]) -> list[Finding]:
    """All of them with estimates corrected for how many they are."""
    estimates = holm({str(number): one.estimate for number, one in enumerate(findings)})
    return [replace(one, estimate=estimates[str(number)]) for number, one in enumerate(findings)]


def tally(findings: Sequence[Finding], *, most: int = 3) -> str:
    """Who is lower, higher, or not seen to differ: up to `most` of each by name, with intervals where one is seen.

    >>> seen, null = Estimate(-0.5, -0.6, -0.4, 0.01, 3), Estimate(0.1, -0.4, 0.6, 0.9, 3)
    >>> tally([Finding("loss", "a", seen), Finding("loss", "b", null), Finding("loss", "c", null)])
    'lower for a (-0.5 [-0.6, -0.4]); no difference seen for b and c'
    """
    groups: dict[str, list[Finding]] = {}
    for one in sorted(findings, key=lambda one: -abs(one.estimate.value) if one.estimate.is_seen else math.inf):
        groups.setdefault(one.verdict, []).append(one)
    if len(groups) == 1 and next(iter(groups)) in NULLS and len(findings) > 1:
        return f"{NULLS[next(iter(groups))]} for any of {len(findings)}"
    parts = []
    for verdict, some in groups.items():
        names = [str(one) if one.estimate.is_seen else one.of for one in some]
        if len(some) > most and some[0].estimate.is_seen:
            parts.append(f"{verdict} for {len(some)} of {len(findings)}, most of all {names[0]}")
        elif len(some) > most:
            parts.append(f"{verdict} for the other {len(some)}")
        else:
            parts.append(f"{verdict} for {together(names)}")
    return "; ".join(parts)


def together(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
