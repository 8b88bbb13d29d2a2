"""First sentences of a page: what attention does, what is unusual and why it matters, what to try.

Words of behaviour ("looks at near tokens") come from an estimate or a measurement only; the theory's are marked.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

from ..behaviour import (
    RANDOM_WEIGHTS,
    Told,
    describe_estimates,
    describe_heads,
    describe_theory,
    head_name,
    look_random,
)
from ..errors import counted
from ..quantities import quantity
from ..records import Json
from .does import MEASURED_SIDES, attentions_of
from .does import head_verdict as summary
from .stories import Sentence, describe_runs, describe_study
from .views import View

MOST_NAMED = 3
MASS = "near_mass"
MOVED = 0.5  # of a head's own scale: a head that moved further is another one


def headline(views: list[View], others: list[Json]) -> list[Sentence]:
    """All sentences of a page: view by view, then those of runs and studies."""
    compared = any(view.is_pair for view in views)
    # A page that has measured attention beside an estimate of it speaks of what was measured.
    columns = [column for view in views for column in view.columns]
    is_measured = any(column.startswith(tuple(f"{side}{MASS}" for side in MEASURED_SIDES)) for column in columns)
    found = [one for n, view in enumerate(views) if view.is_pair for one in _describe_pair(n, view, views)]
    for number, view in enumerate(views):
        if not view.is_pair:
            said = _describe_view(number, view, briefly=compared, may_estimate=not is_measured)
            if compared:  # the sentences of several models stand in one list
                said = [replace(one, text=f"{view.name}: {one.text}") for one in said]
            elif len(views) > 1 or (len(view.frames) > 2 and not view.story):
                said.insert(0, Sentence(_opening(view), number))
            found += said
    found += [
        one for n, view in enumerate(views) if view.is_pair for one in _movement(n, view)
    ]  # the theory's come last
    for document in others:
        found += describe_study(document) if document["schema"] == "locater.study/1" else describe_runs(document)
    return found


# A column, what is said of it where it rose and where it fell, and its name in words.
CHANGES = (
    ("perplexity", "worse on held-out text", "better on held-out text", "perplexity"),
    ("normalised_entropy", "broader attention", "narrower attention", "mean entropy (of 1)"),
    ("entropy", "broader attention", "narrower attention", "mean entropy"),
    ("eta_over_temperature", "larger logits", "smaller logits", "the usual head's scale η/λ"),
    ("eta", "larger logits", "smaller logits", "the usual head's scale η"),
)
SLIGHT = 0.01  # of a number: a smaller change is no change


def _describe_pair(number: int, view: View, views: list[View]) -> Iterable[Sentence]:
    """Describe two models: what changed in words, which heads differ most, then the theory."""
    first, last = view.frames
    said: dict[str, str] = {}
    for column, rose, fell, words in CHANGES:
        before, after = _typical(view, views, column)
        if before is None or after is None or rose in said:
            continue
        change = (after - before) / (abs(before) or 1)
        numbers = " → ".join(f"{one:,.0f}" if abs(one) >= 1000 else f"{one:.3g}" for one in (before, after))
        is_slight = abs(change) < SLIGHT
        change_said = f"{rose if change > 0 else fell} ({words} {numbers})"
        said[rose] = f"{words} as before ({numbers})" if is_slight else change_said
    if said:
        yield Sentence(f"From {first} to {last}: {', '.join(said.values())}.", number)
    yield from _most_changed(number, view)


def _typical(view: View, views: list[View], column: str) -> list[float | None]:
    """Median over heads of each of two models, or the last value of their runs where only these have it."""
    found: list[float | None] = []
    for frame, source in enumerate(view.facts["source"].split(", ")):
        runs = [one for one in views if len(one.frames) > 2 and Path(source).is_relative_to(one.source)]
        if column in view.columns:
            known = [value for value in view.columns[column][frame] if value is not None]
        else:
            known = [value for run in runs for value in run.columns.get(column, [[]])[-1] if value is not None]
            known = known or [run.course[name][-1][1] for run in runs for name in run.course if name.endswith(column)]
        found.append(median(known) if known else None)
    return found


def _most_changed(number: int, view: View) -> Iterable[Sentence]:
    name_of = next((n for n in ("eta_over_temperature", "xi") if n in view.columns), next(iter(view.columns)))
    before, after = view.columns[name_of]
    change = [abs((b or 0) - (a or 0)) for a, b in zip(before, after, strict=True)]
    most = sorted(range(len(change)), key=lambda n: -change[n])[:MOST_NAMED]
    if any(change) and len(change) > 1:
        named = ", ".join(f"{head_name(*view.heads[n])} ({before[n] or 0:.3g} → {after[n] or 0:.3g})" for n in most)
        yield Sentence(f"{quantity(name_of).symbol} differs most in {named}.", number, tuple(most))


def _describe_view(number: int, view: View, *, briefly: bool = False, may_estimate: bool = True) -> list[Sentence]:
    """List the sentences on one model or run; `briefly` leaves out the theory and what changed."""
    # What a reader asks first: is anything wrong; then what it does, what changed, and where to go on.
    told = [Sentence(text, number) for text in view.story]
    found = [*told, *_health(number, view), *_behaviour(number, view, may_estimate)]
    if not briefly:
        theory = [Sentence(text, number) for text in describe_theory(view.regimes[-1])]
        found += [*_movement(number, view), *theory, *_suggest_predict(number, view)]
    found += [Sentence(f"Not read: {reason}.", number, tone="warning") for reason in view.refused[:MOST_NAMED]]
    notes = [note for note in view.notes if not (view.story and note.startswith("step "))]  # told in the story
    return found + [Sentence(f"Note: {note}.", number) for note in notes[:MOST_NAMED]]


def _opening(view: View) -> str:
    layers = len({key[:2] for key in view.heads})
    family = f"a {view.facts['family']} model, " if "family" in view.facts else ""
    opening = f"{view.name}: {family}{counted(len(view.heads), 'attention head')} in {counted(layers, 'layer')}"
    return opening + (f", {len(view.frames)} points in time." if len(view.frames) > 2 else ".")


def verdict(views: list[View]) -> str:
    """The page in one sentence: what changed, what is wrong, or else what heads do."""
    for number, view in enumerate(views):
        if view.is_pair:
            return next((one.text for one in _describe_pair(number, view, views)), "")
    if views and views[0].story:
        return f"{views[0].story[0]} {views[0].story[-1]}"
    alarmed = [one.text for number, view in enumerate(views) for one in _health(number, view) if one.tone == "warning"]
    return " ".join([*alarmed[:1], summary(views[0])]) if views else ""


def _behaviour(number: int, view: View, may_estimate: bool) -> Iterable[Sentence]:
    """Describe behaviour from the best evidence available: measured with profiles, measured without, estimated."""
    measured = attentions_of(view, len(view.frames) - 1)
    if any(measured):
        known = [n for n, one in enumerate(measured) if one is not None]
        found = [one for one in measured if one is not None]
        told = describe_heads([view.heads[n] for n in known], found, text=view.facts.get("text", ""))
        told = [Told(one.sentence, tuple(known[n] for n in one.heads)) for one in told]
    elif may_estimate and "estimated_near_mass" in view.columns:
        intervals = [record.get("estimated_near_mass_interval") for record in view.records]
        told = describe_estimates(view.heads, view.columns["estimated_near_mass"][-1], intervals)
    else:
        return
    yield from (Sentence(one.sentence, number, one.heads) for one in told)
    yield from (Sentence(text, number) for text in view.accuracy)


def _suggest_predict(number: int, view: View) -> Iterable[Sentence]:
    """Suggest `predict` where only weights are known: they do not determine attention."""
    if "family" in view.facts and not any("near_mass" in column for column in view.columns if "estim" not in column):
        words = f"locater predict {view.called} --text FILE --html page.html"
        yield Sentence(f"These are the weights alone. What the heads do on your text: {words}", number, tone="advice")


def _movement(number: int, view: View) -> Iterable[Sentence]:
    if len(view.frames) < 2:
        return
    changed = [n for n, pair in enumerate(zip(view.regimes[0], view.regimes[-1], strict=True)) if pair[0] != pair[1]]
    if (moved := view.columns.get("moved")) and len(view.heads) > 1:
        far = tuple(n for n, distance in enumerate(moved[-1]) if distance is not None and distance > MOVED)
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
    words = counted(len(changed), "head") if changed else "no head"
    yield Sentence(f"In the paper's theory {words} changed regime {course}.", number, tuple(changed))


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
        keys = {(alarm["block"], alarm["layer"], head) for alarm in of_kind for head in alarm["heads"]}
        heads = tuple(sorted(at[key] for key in keys if key in at))
        yield Sentence(
            f"Alarm, {counted(count, 'time')}: {kind}, first at step {of_kind[0]['step']}: {of_kind[0]['meaning']}"
            + (f" ({_names(view, heads)})." if heads else "."),
            number, heads, "warning",
        )  # fmt: skip
        if not view.notes:  # nothing was tried
            yield Sentence(f"Try {of_kind[0]['remedy']}.", number, heads, "advice")


def _names(view: View, heads: tuple[int, ...]) -> str:
    first = ", ".join(head_name(*view.heads[n]) for n in heads[:MOST_NAMED])
    return first + (f" and {len(heads) - MOST_NAMED} more" if len(heads) > MOST_NAMED else "")
