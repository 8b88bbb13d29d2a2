"""Around the monitor's own limits: what a fifth to five times each of them would have said."""

import math
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from locater.monitor.alarms import Thresholds
from locater.records import Json

from .small import TINY

FACTORS = (0.2, 0.5, 1.0, 2.0, 5.0)


class Limit(NamedTuple):
    """An indicator of the study, the field of `Thresholds` that limits it, and what one of its units is."""

    indicator: str
    field: str
    unit: float  # negative where low is bad, as the study counts it


# What the monitor calls log n: its mean over the queries of a causal text, which all have one length here.
LOG_KEYS = fmean(math.log(keys) for keys in range(1, TINY["context"] + 1))
LIMITS = (
    Limit("largest logit", "logit_explosion", LOG_KEYS),
    Limit("low entropy", "entropy_collapse", -1.0),
    Limit("low residual", "rank_collapse", -1.0),
)


def around(judge: Callable[[str, float], Json]) -> list[Json]:
    """Each limit times each factor, judged over all seeds: nothing is chosen here."""
    own = Thresholds()
    return [
        judge(limit.indicator, getattr(own, limit.field) * factor * limit.unit)
        | {"indicator": f"{limit.indicator} at {'' if factor == 1 else f'{factor:g} × '}the monitor's limit"}
        | {"limit": limit.field, "factor": factor}
        for limit in LIMITS
        for factor in FACTORS
    ]


def said(judged: list[Json]) -> str:
    """Describe how much the first limit matters: between half and twice it."""
    some = [one for one in judged if one["limit"] == LIMITS[0].field and one["factor"] in (0.5, 1.0, 2.0)]
    caught, false = ([one[name] for one in some] for name in ("caught", "false"))
    return (
        f"from half to twice their limit on the largest logit, {_span(caught)} are caught and {_span(false)} healthy "
        "runs alarmed"
    )


def _span(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
