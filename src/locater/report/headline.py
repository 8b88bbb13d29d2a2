"""First sentences of a page: what attention does, what is unusual and why it matters, what to try.

Words of behaviour ("looks at near tokens") come from an estimate or a measurement only; the theory's are marked.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median

from ..behaviour import (
    RANDOM_WEIGHTS,
    Attention,
    Told,
    describe,
    describe_estimates,
    describe_theory,
    head_name,
    look_random,
    numbers_of,
)
from ..errors import counted
from ..quantities import quantity
from ..records import Json
from .views import View

MOST_NAMED = 3
MASS = "near_mass"
MEASURED_SIDES = ("measured_", "")  # of a column's name, the best evidence first
MOVED = 0.5  # of a head's own scale: a head that moved further is another one
MEASURED = ("near_mass_beyond_first", "normalised_entropy", "sink_mass")


@dataclass(frozen=True)
class Sentence:
    """One sentence, the view and heads that it speaks of, and its tone: plain, good, warning or advice."""

    text: str
    view: int = 0
    heads: tuple[int, ...] = ()
    tone: str = "plain"

    def to_json(self) -> Json:
        return asdict(self)


def headline(views: list[View], others: list[Json]) -> list[Sentence]:
    """All sentences of a page: view by view, then those of runs and studies."""
    compared = any(view.is_pair for view in views)
    # A page that has measured attention beside an estimate of it speaks of what was measured.
    columns = [column for view in views for column in view.columns]
    is_measured = any(column.startswith(tuple(f"{side}{MASS}" for side in MEASURED_SIDES)) for column in columns)
    found = [one for n, view in enumerate(views) if view.is_pair for one in _of_pair(n, view)]
    for number, view in enumerate(views):
        if not view.is_pair:
            found += _of_view(number, view, briefly=compared, may_estimate=not is_measured)
    for document in others:
        found += _of_study(document) if document["schema"] == "locater.study/1" else _of_runs(document)
    return found


def _of_study(document: Json) -> Iterable[Sentence]:
    """Its own sentences, made from its rows."""
    yield Sentence(document["question"])
    yield from (Sentence(answer, tone="good") for answer in document["answer"])
    if failures := document["failures"]:
        yield Sentence(f"{counted(len(failures), 'point')} could not be measured.", tone="warning")


def _of_pair(number: int, view: View) -> Iterable[Sentence]:
    """Describe two models: the usual head of each, and where they differ most."""
    first, last = view.frames
    name_of = next((n for n in ("eta_over_temperature", "xi") if n in view.columns), next(iter(view.columns)))
    usual = []
    for column in ("eta_over_temperature", "xi", "localisation"):
        if column in view.columns:
            before, after = (median([x for x in frame if x is not None] or [0.0]) for frame in view.columns[column])
            usual.append(f"{quantity(column).symbol} {before:.3g} → {after:.3g}")
    yield Sentence(f"From {first} to {last}, the usual head: {', '.join(usual)}.", number)
    before, after = view.columns[name_of]
    change = [abs((b or 0) - (a or 0)) for a, b in zip(before, after, strict=True)]
    most = sorted(range(len(change)), key=lambda n: -change[n])[:MOST_NAMED]
    if not any(change):
        return
    named = ", ".join(f"{head_name(*view.heads[n])} ({before[n] or 0:.3g} → {after[n] or 0:.3g})" for n in most)
    yield Sentence(f"{quantity(name_of).symbol} differs most in {named}.", number, tuple(most))
    yield from _movement(number, view)


def _of_view(number: int, view: View, *, briefly: bool = False, may_estimate: bool = True) -> list[Sentence]:
    layers = len({key[:2] for key in view.heads})
    family = f"a {view.facts['family']} model, " if "family" in view.facts else ""
    opening = f"{view.name}: {family}{counted(len(view.heads), 'attention head')} in {counted(layers, 'layer')}"
    opening += f", {len(view.frames)} points in time." if len(view.frames) > 2 else "."
    found = [Sentence(opening, number)]
    # What a reader asks first: is anything wrong, has anything changed; then what it does, and where to go on.
    found += [*_health(number, view), *_movement(number, view), *_behaviour(number, view, may_estimate)]
    if not briefly:
        found += [*(Sentence(text, number) for text in describe_theory(view.regimes[-1])), *_next(number, view)]
    found += [Sentence(f"Not read: {reason}.", number, tone="warning") for reason in view.refused[:MOST_NAMED]]
    return found + [Sentence(f"Note: {note}.", number) for note in view.notes[:MOST_NAMED]]


def _behaviour(number: int, view: View, may_estimate: bool) -> Iterable[Sentence]:
    """Describe behaviour from the best evidence available: measured with profiles, measured without, estimated."""
    measured = _with_profiles(view) or _without_profiles(view)
    if measured:
        known = [n for n, one in enumerate(measured) if one is not None]
        attentions = [one for one in measured if one is not None]
        told = describe([view.heads[n] for n in known], attentions, text=view.facts.get("text", ""))
        told = [Told(one.sentence, tuple(known[n] for n in one.heads)) for one in told]
    elif may_estimate and "estimated_near_mass" in view.columns:
        intervals = [record.get("estimated_near_mass_interval") for record in view.records]
        told = describe_estimates(view.heads, view.columns["estimated_near_mass"][-1], intervals)
    else:
        return
    yield from (Sentence(one.sentence, number, one.heads) for one in told)
    yield from _accuracy(number, view)


def _with_profiles(view: View) -> list[Attention | None]:
    """Attention of heads that were measured on text; empty where a view has no profiles, or not all numbers."""
    found: list[Attention | None] = []
    for record in view.records:
        profile = record.get("attention_profile", {}).get("measured")
        is_known = profile and len(profile) > 1 and all(f"measured_{name}" in record for name in MEASURED)
        found.append(numbers_of({n: record[f"measured_{n}"] for n in MEASURED}, profile) if is_known else None)
    return found if len(view.frames) == 1 and any(found) else []


def _without_profiles(view: View) -> list[Attention | None]:
    """The same from columns alone, as of a monitor: what is not known meets no rule."""

    def column(name: str) -> list[float]:
        of_side = next((view.columns[side + name] for side in MEASURED_SIDES if side + name in view.columns), None)
        return (
            [math.nan if value is None else value for value in of_side[-1]] if of_side else [math.nan] * len(view.heads)
        )

    near, entropy, first = (column(name) for name in MEASURED)
    # With the first token in it a small near mass tells nothing: a sink is not far.
    near = [
        own if own == own else mass if mass > 0.5 else math.nan for own, mass in zip(near, column(MASS), strict=True)
    ]
    if not any(one == one for one in near):
        return []
    return [Attention(*three, math.nan, math.nan) for three in zip(near, entropy, first, strict=True)]


def _accuracy(number: int, view: View) -> Iterable[Sentence]:
    """State how well the prediction ranks the heads, next to what it says."""
    ranks = [
        f"{quantity(name).heading} {view.accuracy[name]:.2f}"
        for name in MEASURED
        if view.accuracy.get(name) is not None
    ]
    if ranks:
        yield Sentence(f"Rank correlation (Spearman) of prediction and measurement: {', '.join(ranks)}.", number)


def _next(number: int, view: View) -> Iterable[Sentence]:
    """Weights alone cannot say what a text makes of them."""
    if "family" in view.facts and not any("near_mass" in column for column in view.columns if "estim" not in column):
        words = "locater predict MODEL --text FILE --html page.html"
        yield Sentence(f"These are the weights alone. What the heads do on your text: {words}", number, tone="advice")


def _movement(number: int, view: View) -> Iterable[Sentence]:
    if len(view.frames) < 2:
        return
    changed = [n for n, pair in enumerate(zip(view.regimes[0], view.regimes[-1], strict=True)) if pair[0] != pair[1]]
    if moved := view.columns.get("moved"):
        far = _where(moved[-1], lambda distance: distance > MOVED)
        most = max(range(len(view.heads)), key=lambda n: moved[-1][n] or 0)
        yield Sentence(
            f"{counted(len(far), 'head') if far else 'No head'} moved by more than half of its scale; "
            f"most of all {head_name(*view.heads[most])}.",
            number, far or (most,),
        )  # fmt: skip
    if not any(view.regimes[-1]):
        return
    # A page may have several runs and pairs: each sentence says whose it is.
    first, last = view.frames[0], view.frames[-1]
    steps = "steps " if first.isdigit() else ""
    course = f"from {first} to {last}" if view.is_pair else f"in {view.name} between {steps}{first} and {last}"
    words = counted(len(changed), "head") if changed else "No head"
    yield Sentence(f"{words} changed regime {course}.", number, tuple(changed))


def _health(number: int, view: View) -> Iterable[Sentence]:
    yield from _alarms(number, view)
    names = ("trace", "frobenius_squared", "d_model")
    heads = [tuple(record[name] for name in names) for record in view.records if all(n in record for n in names)]
    if look_random(heads):
        yield Sentence(RANDOM_WEIGHTS, number, tone="warning")


def _alarms(number: int, view: View) -> Iterable[Sentence]:
    at = {key: n for n, key in enumerate(view.heads)}
    kinds = Counter(alarm["kind"] for alarm in view.alarms)
    for kind, count in kinds.most_common(MOST_NAMED):
        of_kind = [alarm for alarm in view.alarms if alarm["kind"] == kind]
        keys = {(alarm["block"], alarm["layer"], head) for alarm in of_kind for head in _alarmed(alarm)}
        heads = tuple(sorted(at[key] for key in keys if key in at))
        yield Sentence(
            f"Alarm, {counted(count, 'time')}: {kind}, first at step {of_kind[0]['step']}: {of_kind[0]['meaning']}"
            + (f" ({_names(view, heads)})." if heads else "."),
            number, heads, "warning",
        )  # fmt: skip
        yield Sentence(f"Try {of_kind[0]['remedy']}.", number, heads, "advice")


def _alarmed(alarm: Json) -> list[int]:
    """The heads of an alarm; older monitors named one, or none for a whole layer."""
    return alarm["heads"] if "heads" in alarm else [alarm["head"]] * (alarm.get("head") is not None)


def _of_runs(document: Json) -> Iterable[Sentence]:
    arms, score = document["arms"], document["score"]
    scored = [arm for arm in arms if score in arm["quantities"]]
    runs = sum(len(arm["seeds"]) for arm in arms)
    yield Sentence(f"{counted(runs, 'run')} in {counted(len(arms), 'arm')}, compared at step {document['step']}.")
    if scored:
        best = scored[0]["quantities"][score]
        error = best["standard_error"]
        within = "one seed only: no interval" if error is None else f"± {_plain(error)} over {len(best['seeds'])} seeds"
        yield Sentence(f"Best {score}: {scored[0]['arm']} with {_plain(best['mean'])} ({within}).", tone="good")
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
                f"{score.capitalize()} clearly {words} than of {document['against']}, paired by seed: {named}.",
                tone=tone,
            )
    if differences and document.get("against") and len(known) < len(differences) - 1:
        single = counted(len(differences) - 1 - len(known), "arm")
        yield Sentence(f"{single} with a single seed: no interval, so nothing is claimed of them.")


def _names(view: View, heads: tuple[int, ...]) -> str:
    first = ", ".join(head_name(*view.heads[n]) for n in heads[:MOST_NAMED])
    return first + (f" and {len(heads) - MOST_NAMED} more" if len(heads) > MOST_NAMED else "")


def _where(values: list[float | None], met: Callable[[float], bool]) -> tuple[int, ...]:
    return tuple(n for n, value in enumerate(values) if value is not None and met(value))


def _plain(value: float) -> str:
    """Four digits, and thousands without an exponent.

    >>> _plain(32368.4), _plain(0.123456)
    ('32,368', '0.1235')
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
