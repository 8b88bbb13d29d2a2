"""The story of a watched run in five sentences: how long, since when, in which heads, what was tried, did it help."""

import re
from collections import Counter
from collections.abc import Sequence

from ..records import Json

SERIOUS = ("not finite", "logit explosion", "entropy collapse", "rank collapse")
MOST_NAMED = 3


def tell(reports: Sequence[Json]) -> list[str]:
    """Sentences about a monitor's reports, in the order in which they are asked for the morning after."""
    reports = sorted(reports, key=lambda report: report["step"])
    if not reports:
        return []
    wrong = [report for report in reports if _serious(report)]
    steps = f"steps {reports[0]['step']:,} to {reports[-1]['step']:,}"
    counted = f"{len(reports)} report{'s' if len(reports) > 1 else ''} over {steps}"
    if not wrong:
        return [f"{counted}, none with a serious alarm.", _extreme(reports)]
    lines = [line for report in reports for line in report.get("actions", [])]
    return [
        f"{counted}, {len(wrong)} with a serious alarm.",
        _beginning(wrong[0]),
        _heads(wrong),
        f"Tried: {'; '.join(line.rstrip('.') for line in lines)}." if lines else "Nothing was tried.",
        _outcome(reports, lines),
    ]


def _serious(report: Json) -> list[Json]:
    return [alarm for alarm in report.get("alarms", []) if alarm["kind"] in SERIOUS]


def _beginning(report: Json) -> str:
    first = _serious(report)[0]
    where = f"{first['block']} layer {first['layer']}"
    return f"It began at step {report['step']:,}: {first['kind']} in {where}, {first['meaning']}."


def _heads(wrong: Sequence[Json]) -> str:
    """Name the heads by how many of these reports have them."""
    counts: Counter[str] = Counter()
    for report in wrong:
        places = {
            f"{alarm['layer']}.{head}" if alarm["heads"] else f"layer {alarm['layer']}"
            for alarm in _serious(report)
            for head in alarm["heads"] or [None]
        }
        counts.update(sorted(places))
    named = [f"{place} ({count})" for place, count in counts.most_common(MOST_NAMED)]
    further = f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
    return f"Most often in {', '.join(named)}{further}, as layer.head (reports)."


def _largest(report: Json) -> float | None:
    layers = report.get("training") or report.get("evaluation") or []
    known = [value for layer in layers for value in layer["statistics"].get("max_logit", ()) if value is not None]
    return max(known, default=None)


def _extreme(reports: Sequence[Json]) -> str:
    known = [(value, report["step"]) for report in reports if (value := _largest(report)) is not None]
    if not known:
        return "No logit was measured."
    value, step = max(known)
    return f"The largest logit was {value:.4g}, at step {step:,}."


def _outcome(reports: Sequence[Json], lines: Sequence[str]) -> str:
    """Compare the reports after the last action with the one that led to it."""
    found = [int(match[1]) for line in lines if (match := re.match(r"step (\d+):", line))]
    if not found:
        ended = "goes on to the last report" if _serious(reports[-1]) else "was gone by the last report"
        return f"It {ended}. {_extreme(reports)}"
    since = max(found)
    after, at = [report for report in reports if report["step"] > since], [r for r in reports if r["step"] <= since]
    if not after:
        return f"No report came after the last of these, at step {since:,}."
    still = sum(bool(_serious(report)) for report in after)
    sizes = [size for report in (*at[-1:], after[-1]) if (size := _largest(report)) is not None]
    change = f", and the largest logit went from {sizes[0]:.4g} to {sizes[1]:.4g}" if len(sizes) == 2 else ""
    verdict = "It helped" if still == 0 else "It did not help" if still == len(after) else "It helped in part"
    return f"{verdict}: {still} of {len(after)} later reports have a serious alarm{change}."
