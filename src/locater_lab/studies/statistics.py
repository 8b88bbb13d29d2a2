"""Differences and correlations with their uncertainty, and the words that they allow; knows no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import fmean, stdev
from typing import Literal

import numpy

from locater.records import Json

LEVEL = 0.95
# Fewer pairs than this make no claim, whatever their interval.
FEWEST = 3
# Differences of seeds that are this near to each other, as a share of what is compared, are equal but for rounding.
SAME = 1e-9
ORDERED = 7  # points whose orders are all tried


@dataclass(frozen=True)
class MeanEstimate:
    """A number with its interval; `count` is of pairs, or of points, and `p` that of no difference.

    The interval is never adjusted. `adjusted` is p after Holm's correction, where several were compared.
    """

    value: float
    low: float
    high: float
    p: float
    count: int
    adjusted: float | None = None

    @property
    def is_seen(self) -> bool:
        """True if the interval leaves out zero, enough points support it, and the adjusted p is small."""
        is_outside = self.count >= FEWEST and (self.low > 0 or self.high < 0)
        return is_outside and (self.adjusted is None or self.adjusted < 1 - LEVEL)

    @property
    def shown_p(self) -> str:
        """The adjusted p for a table; empty where nothing was adjusted."""
        if self.adjusted is None:
            return ""
        return "< 0.001" if self.adjusted < 0.001 else f"{self.adjusted:.3f}"

    def __str__(self) -> str:
        """Three digits of the largest, and as many places of the others."""
        if math.isnan(self.value):
            return "–"
        parts = [value for value in (self.value, self.low, self.high) if math.isfinite(value)]
        largest = max(map(abs, parts), default=0.0)
        places = max(0, 2 - math.floor(math.log10(largest))) if largest else 0
        value, low, high = (f"{part:+.{places}f}" for part in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]" if len(parts) == 3 else f"{value} (no interval)"


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> MeanEstimate:
    """Mean difference over the seeds that both have, with Student's interval of its pairs.

    Nothing is assumed of what two seeds share, only that differences of seeds are alike. One pair has no interval, nor
    have pairs that agree exactly: they show no spread to judge by, which is not certainty.
    """
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    mean = fmean(differences) if differences else math.nan
    scale = max(map(abs, [*ours.values(), *theirs.values()]), default=0.0)
    if not differences or max(differences) - min(differences) <= SAME * scale:
        return MeanEstimate(mean, -math.inf, math.inf, 1.0, len(differences))
    from scipy.stats import t

    error, free = stdev(differences) / math.sqrt(len(differences)), len(differences) - 1
    half = float(t.ppf((1 + LEVEL) / 2, free)) * error
    return MeanEstimate(mean, mean - half, mean + half, 2 * float(t.sf(abs(mean) / error, free)), len(differences))


def spearman_estimate(x: Sequence[float], y: Sequence[float]) -> MeanEstimate:
    """Rank correlation with the interval of Fisher's z, widened for ranks (Bonett and Wright 2000).

    Of few points p is the share of all orders that are as far from 0.
    """
    from scipy.stats import norm, rankdata, spearmanr

    if len(x) < 4 or len(set(x)) == 1 or len(set(y)) == 1:
        return MeanEstimate(math.nan, -1.0, 1.0, 1.0, len(x))
    found = spearmanr(x, y)
    value = max(-0.999999, min(0.999999, float(found.statistic)))  # type: ignore
    error = math.sqrt((1 + value**2 / 2) / (len(x) - 3))
    half = float(norm.ppf((1 + LEVEL) / 2)) * error
    low, high = (math.tanh(math.atanh(value) + side * half) for side in (-1, 1))
    p = float(found.pvalue)  # type: ignore
    if len(x) <= ORDERED:
        ranks, orders = rankdata(x) - (len(x) + 1) / 2, numpy.array(list(permutations(rankdata(y))))
        products = numpy.abs(orders @ ranks)
        p = float((products >= abs(rankdata(y) @ ranks) - 1e-9).mean())
    return MeanEstimate(value, low, high, p, len(x))


def holm(estimates: Mapping[str, MeanEstimate]) -> dict[str, MeanEstimate]:
    """Each with p adjusted for how many were compared (Holm 1979), beside the interval as it was.

    >>> two = {"a": MeanEstimate(1.0, 0.5, 1.5, 0.01, 9), "b": MeanEstimate(1.0, 0.1, 1.9, 0.03, 9)}
    >>> [(one.adjusted, one.low) for one in holm(two).values()]
    [(0.02, 0.5), (0.03, 0.1)]
    """
    adjusted: dict[str, MeanEstimate] = {}
    highest = 0.0
    ordered = sorted(estimates.items(), key=lambda item: item[1].p)
    for place, (name, one) in enumerate(ordered):
        highest = max(highest, min(1.0, one.p * (len(ordered) - place)))
        adjusted[name] = replace(one, adjusted=highest)
    return {name: adjusted[name] for name in estimates}


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's, of the points of a grid: an effect size, for a grid that was chosen has no sampling error."""
    return spearman_estimate(x, y).value


def partial_correlation(x: Sequence[float], y: Sequence[float], given: Sequence[float]) -> float:
    """Spearman's of x and y at equal `given`; NaN where that leaves one of them nothing.

    >>> round(partial_correlation([1, 2, 3, 4], [1, 3, 2, 4], [1, 2, 4, 3]), 2), partial_correlation([1], [1], [1])
    (0.87, nan)
    """
    both, ours, theirs = (rank_correlation(*pair) for pair in ((x, y), (x, given), (y, given)))
    left = (1 - ours**2) * (1 - theirs**2)
    return (both - ours * theirs) / math.sqrt(left) if left > 1e-5 else math.nan


def seed_means(rows: Sequence[Json], keys: Sequence[str], names: Sequence[str]) -> list[Json]:
    """One row for each point of the grid: means over the seeds, which are no points of their own.

    >>> seed_means([{"x": 1, "seed": 0, "y": 2.0}, {"x": 1, "seed": 1, "y": 4.0}], ["x"], ["y"])
    [{'x': 1, 'y': 3.0}]
    """
    points: dict[tuple, list[Json]] = {}
    for row in rows:
        points.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        dict(zip(keys, point, strict=True)) | {name: fmean(row[name] for row in some) for name in names}
        for point, some in points.items()
    ]


def matched_difference(strata: Sequence[tuple[Sequence[bool], Sequence[bool]]]) -> float:
    """Mantel and Haenszel's difference of two shares: the strata's own, weighed by n₁n₂/(n₁ + n₂); NaN without overlap.

    A confounder that fixes the stratum makes no difference here.

    >>> matched_difference([([True] * 9, [True]), ([False], [False] * 9)])
    0.0
    """
    both = [(ours, theirs) for ours, theirs in strata if ours and theirs]
    weights = [len(ours) * len(theirs) / (len(ours) + len(theirs)) for ours, theirs in both]
    differences = [sum(ours) / len(ours) - sum(theirs) / len(theirs) for ours, theirs in both]
    total = sum(weight * difference for weight, difference in zip(weights, differences, strict=True))
    return total / sum(weights) if weights else math.nan


@dataclass(frozen=True)
class Finding:
    """One comparison: `what` was looked at, `of` whom (with whom it is compared), and what its interval allows to say.

    Of `kind` "difference" it is paired by seed, of "relation" it is a rank correlation over points.
    """

    what: str
    of: str
    estimate: MeanEstimate
    kind: Literal["difference", "relation"] = "difference"

    @property
    def verdict(self) -> str:
        one = self.estimate
        if self.kind == "relation":
            if math.isnan(one.value):
                return "too few seeds or points, or no variation"
            return ("rises" if one.value > 0 else "falls") if one.is_seen else "no relation seen"
        if one.count < FEWEST:
            return "too few seeds"
        if math.isinf(one.low) and one.value:
            return "no spread to judge by"
        return ("lower" if one.value < 0 else "higher") if one.is_seen else "no difference seen"

    def __str__(self) -> str:
        return f"{self.of} ({self.estimate})"

    def to_json(self) -> Json:
        one = self.estimate
        known = {name: getattr(one, name) for name in NUMBERS}
        numbers = {name: value if value is not None and math.isfinite(value) else None for name, value in known.items()}
        return {
            "what": self.what,
            "of": self.of,
            "kind": self.kind,
            "count": one.count,
            "verdict": self.verdict,
        } | numbers


NUMBERS = ("value", "low", "high", "p", "adjusted")


NULLS = ("no difference seen", "no relation seen")


def corrected(findings: Sequence[Finding]) -> list[Finding]:
    """All of them with estimates corrected for how many they are."""
    estimates = holm({str(number): one.estimate for number, one in enumerate(findings)})
    return [replace(one, estimate=estimates[str(number)]) for number, one in enumerate(findings)]


def tally(findings: Sequence[Finding], *, most: int = 3) -> str:
    """List who is lower, higher, or not seen to differ: up to `most` of each by name; the strongest with its interval.

    >>> seen, null = MeanEstimate(-0.5, -0.6, -0.4, 0.01, 3), MeanEstimate(0.1, -0.4, 0.6, 0.9, 3)
    >>> tally([Finding("loss", "a", seen), Finding("loss", "b", null), Finding("loss", "c", null)])
    'lower for a (-0.500 [-0.600, -0.400]); no difference seen for b and c'
    """
    groups: dict[str, list[Finding]] = {}
    for one in sorted(findings, key=lambda one: -abs(one.estimate.value) if one.estimate.is_seen else math.inf):
        groups.setdefault(one.verdict, []).append(one)
    if len(groups) == 1 and len(findings) > 1 and next(iter(groups)) in NULLS:
        return f"{next(iter(groups))} for any of {len(findings)}"
    return "; ".join(f"{verdict} for {_who(some, len(findings), most)}" for verdict, some in groups.items())


def _who(some: Sequence[Finding], total: int, most: int) -> str:
    """The members of one group."""
    is_seen = some[0].estimate.is_seen
    names = [str(some[0]) if is_seen else some[0].of, *(one.of for one in some[1:])]
    if len(some) <= most:
        return together(names)
    if not is_seen:
        return f"the other {len(some)}" if len(some) < total else f"all {total}"
    return (f"all {total}" if len(some) == total else f"{len(some)} of {total}") + f", most for {names[0]}"


def together(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
