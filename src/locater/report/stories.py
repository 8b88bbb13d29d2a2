"""Sentences on a prediction's accuracy, runs, studies and a monitor's reports; reports as steps with their alarms."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from ..behaviour import RANDOM_IDS, MeanAttention, words_of
from ..errors import counted
from ..quantities import quantity
from ..records import Json

MONITOR = "locater.monitor/1"
STEPS = "locater.steps/1"
# What a scan calls by another name.
SAME = {"sigma_1": "sigma"}
SERIOUS = ("not finite", "logit explosion", "entropy collapse", "rank collapse")
MOST_NAMED = 3
STOPPED = re.compile(r"step (\d+): stopped")


@dataclass(frozen=True)
class Sentence:
    """One sentence, the view and heads that it speaks of, and its tone: plain, good, warning or advice."""

    text: str
    view: int = 0
    heads: tuple[int, ...] = ()
    tone: str = "plain"

    def to_json(self) -> Json:
        return asdict(self)


def steps_of(reports: Sequence[Json], source: str) -> Json:
    """One document of steps; the heads are those of training, or of evaluation where nothing was trained."""
    steps, alarms, notes, story = [], [], [], tell(reports)
    reports = standing(reports)
    for report in reports:
        heads = [head for layer in report.get("training") or report.get("evaluation") or [] for head in _heads(layer)]
        steps.append({"step": report["step"], "heads": heads})
        alarms += [alarm | {"step": report["step"]} for alarm in report.get("alarms", [])]
        notes += report.get("notes", [])
    notes = [line.rstrip(".") for report in reports for line in report.get("actions", [])] + notes
    found = {"steps": steps, "alarms": alarms, "notes": list(dict.fromkeys(notes)), "story": story}
    return {"schema": STEPS, "source": source, **found}


def _heads(layer: Json) -> list[Json]:
    """A layer as heads: the statistics by head instead of the heads by statistic."""
    found: list[Json] = [{"block": layer["block"], "layer": layer["layer"], "head": head} for head in layer["heads"]]
    columns: dict[str, list] = {**layer["statistics"], **layer.get("weights", {})}
    for name, values in columns.items():
        for record, value in zip(found, values, strict=True):
            record[SAME.get(name, name)] = value
    return found


def tell(reports: Sequence[Json]) -> list[str]:
    """Sentences about a monitor's reports, in the order in which they are asked for the morning after."""
    num_all, reports = len(reports), standing(reports)
    if not reports:
        return []
    wrong = [report for report in reports if _serious(report)]
    steps = f"steps {reports[0]['step']:,} to {reports[-1]['step']:,}"
    again = f" ({num_all - len(reports)} of steps that were run again left out)" if num_all > len(reports) else ""
    begin = f"{counted(len(reports), 'report')} over {steps}{again}"
    if not wrong:
        return [f"{begin}, none with a serious alarm.", _extreme(reports)]
    lines = [line for report in reports for line in report.get("actions", [])]
    return [
        f"{begin}, {len(wrong)} with a serious alarm.",
        _beginning(wrong[0]),
        _worst(wrong),
        _tried(lines),
        _outcome(reports, lines),
    ]


def standing(reports: Sequence[Json]) -> list[Json]:
    """Leave out reports whose steps were run again: a run taken up from a checkpoint writes behind the log it had.

    >>> [one["step"] for one in standing([{"step": 0}, {"step": 10}, {"step": 20}, {"step": 10}])]
    [0, 10]
    """
    kept: list[Json] = []
    for report in reports:
        while kept and kept[-1]["step"] >= report["step"]:
            kept.pop()
        kept.append(report)
    return kept


def _serious(report: Json) -> list[Json]:
    return [alarm for alarm in report.get("alarms", []) if alarm["kind"] in SERIOUS]


def _beginning(report: Json) -> str:
    first = _serious(report)[0]
    where = f"{first['block']} layer {first['layer']}"
    return f"It began at step {report['step']:,}: {first['kind']} in {where}, {first['meaning']}."


def _worst(wrong: Sequence[Json]) -> str:
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


def _tried(lines: Sequence[str]) -> str:
    """List what was done, without the reasons, which are in the alarms; of many lines the first and the last."""
    short = [
        re.sub(r", because of [^;]*(; the weights.*)?|, in spite of [^:]*| from now on \(.*", "", line).rstrip(".")
        for line in lines
    ]
    short = [re.sub(r"; (?=[\d.]+ times)", " with ", line) for line in short]
    if (further := len(short) - MOST_NAMED) > 0:
        short[MOST_NAMED - 1 : -1] = [f"{further} more"]
    return f"Tried: {'; '.join(short)}." if short else "Nothing was tried."


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
    """Compare the reports after the last action that has any with the one that led to it."""
    found = [int(match[1]) for line in lines if (match := re.match(r"step (\d+): (?:rolled|attached)", line))]
    if not found:
        ended = "goes on to the last report" if _serious(reports[-1]) else "was gone by the last report"
        return f"It {ended}. {_extreme(reports)}"
    since = max((step for step in found if step < reports[-1]["step"]), default=max(found))
    after, at = [report for report in reports if report["step"] > since], [r for r in reports if r["step"] <= since]
    if not after:
        return f"No report came after step {since:,}."
    still = sum(bool(_serious(report)) for report in after)
    sizes = [size for report in (*at[-1:], after[-1]) if (size := _largest(report)) is not None]
    change = f", and the largest logit went from {sizes[0]:.4g} to {sizes[1]:.4g}" if len(sizes) == 2 else ""
    in_part = "helped for a time" if _serious(reports[-1]) else "helped in the end"
    helped = "helped" if still == 0 else "did not help" if still == len(after) else in_part
    stopped = next(
        (f" The run was stopped at step {match[1]}." for line in lines if (match := STOPPED.match(line))), ""
    )
    words = f"{still} of {len(after)} reports after step {since:,} have a serious alarm{change}.{stopped}"
    return f"What was tried {helped}: {words}"


PLAINLY = {
    "near_mass_beyond_first": "share on near tokens",
    "sink_mass": "share on the first token",
    "mean_distance": "mean distance",
}


def describe_accuracy(ranks: Mapping[str, float | None], errors: Mapping[str, float]) -> list[str]:
    """State how well a prediction ranks the heads and how far it is off, beside what is said of them.

    >>> describe_accuracy({"sink_mass": 0.987, "mean_distance": None}, {"sink_mass": 0.0342})[0].partition(": ")[2]
    'share on the first token 0.987 (mean error 0.034).'
    """
    known = []
    for name, rho in ranks.items():
        error = f" (mean error {errors[name]:.2g}{' tokens' * (name == 'mean_distance')})" if name in errors else ""
        known += [] if rho is None else [f"{PLAINLY.get(name, quantity(name).heading)} {rho:.3f}{error}"]
    opening = "How alike prediction and measurement order the heads (rank correlation, 1 at best)"
    return [f"{opening}: {', '.join(known)}."] if known else []


def describe_windows(text: str, length: int, windows: Mapping[str, int], tokens: Mapping[str, int]) -> str:
    """Name the text and how much of it was measured, and predicted from.

    >>> sizes = {"calibration": 24, "test": 8}, {"calibration": 6144, "test": 2048}
    >>> describe_windows("Python's docstrings", 256, *sizes)
    "Measured on 2,048 tokens of Python's docstrings (8 windows of 256), predicted from 6,144 others."
    """
    measured = f"{tokens['test']:,} tokens of {text} ({counted(windows['test'], 'window')} of {length:,})"
    return f"Measured on {measured}, predicted from {tokens['calibration']:,} others."


def describe_halves(halves: Sequence[tuple[MeanAttention, MeanAttention]], *, text: str) -> list[str]:
    """State how many of the words that one half of the windows says hold on the other half."""
    said = [(word, other) for one, two in halves for a, other in ((one, two), (two, one)) for word in words_of(a, text)]
    share = sum(word.holds(other) for word, other in said) / max(1, len(said))
    whole = "The random ids were" if text == RANDOM_IDS else "The text measured was"
    came = f"{share:.0%} of these words, said of heads on one half, came out the same on the other"
    return [f"{whole} split in two: {came}."] if said else []


def describe_study(document: Json) -> Iterable[Sentence]:
    """Yield a study's own sentences, made from its rows."""
    # The question is the page's title; the answers are Markdown, for docs/studies.md.
    yield from (Sentence(re.sub(r"\*(\w[^*]*)\*", r"\1", answer), tone="good") for answer in document["answer"])
    if failures := document["failures"]:
        yield Sentence(f"{counted(len(failures), 'point')} could not be measured.", tone="warning")


def describe_runs(document: Json) -> Iterable[Sentence]:
    """Yield sentences on runs: how many there are, the best arm, clear differences, and what is left out."""
    arms, score = document["arms"], document["score"]
    scored = [arm for arm in arms if score in arm["quantities"]]
    runs = sum(len(arm["seeds"]) for arm in arms)
    yield Sentence(f"{counted(runs, 'run')} in {counted(len(arms), 'arm')}, compared at step {document['step']}.")
    if scored:
        best = scored[0]["quantities"][score]
        error = best["standard_error"]
        within = "one seed only: no interval" if error is None else f"± {_plain(error)} over {len(best['seeds'])} seeds"
        tone = "plain" if error is None else "good"
        yield Sentence(f"Best {score}: {_plain(best['mean'])}, of arm {scored[0]['arm']} ({within}).", tone=tone)
        yield from _against(document, score)
    for one in document["left_out"][:MOST_NAMED]:
        reason = f"failed: {one['error']}" if "error" in one else "did not reach that step"
        yield Sentence(f"Left out: {one['run']} {reason}.", tone="warning")


def _against(document: Json, score: str) -> Iterable[Sentence]:
    """Yield the arms that differ from the reference by more than twice the standard error of the paired difference."""
    differences = {arm["arm"]: arm.get("differences", {}).get(score) for arm in document["arms"]}
    known = {arm: found for arm, found in differences.items() if found and found["standard_error"] is not None}
    for words, sign, tone in (("lower", -1, "good"), ("higher", 1, "warning")):
        clear = {arm: one for arm, one in known.items() if sign * one["mean"] > 2 * one["standard_error"]}
        named = ", ".join(
            f"{arm} by {abs(one['mean']):.3g} ± {one['standard_error']:.2g}" for arm, one in list(clear.items())[:4]
        )
        if clear:
            yield Sentence(
                f"{score.capitalize()} clearly {words} than that of {document['against']}, paired by seed: {named}.",
                tone=tone,
            )
    if differences and document.get("against") and len(known) < len(differences) - 1:
        single = counted(len(differences) - 1 - len(known), "arm")
        yield Sentence(f"{single} with a single seed: no interval, so nothing is claimed of them.")


def _plain(value: float) -> str:
    """Four digits, and thousands without an exponent.

    >>> _plain(32368.4), _plain(0.123456)
    ('32,368', '0.1235')
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
