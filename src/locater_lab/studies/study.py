"""The one shape of a study: a grid of points → rows → a figure → sentences that code writes from the rows.

Add one: a file with a `Study`, and its name in `STUDIES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

from locater.errors import BadArguments
from locater.records import Json, as_written

from .floors import ARMS as FLOORS
from .floors import Floors, floors
from .statistics import Finding, together
from .sweep.folder import Measure, Point, Row, Sweep

# By the number that the paper's readers asked it under; Q2 is `real-data`, whose rows are of whole models.
STUDIES = {
    "profiles": "",
    "collapse": "",
    "mechanism": "Q1",
    "softmax": "Q3",
    "reconcile": "Q4",
    "localisation-helps": "Q5",
    "rivals": "Q6",
    "depth": "Q7",
    "metrics": "Q8",
    "sensitivity": "Q9",
    "spectrum-vs-attention": "Q10",
}


@dataclass(frozen=True)
class Figure:
    """Lines (or points) of `y` over `x`, one for each value of `by`, a panel for each of `panel`; means over the rest.

    Of kind "intervals" it draws findings: a line for each of whom, a panel for each of what the study's `drawn` names.
    """

    x: str
    y: str
    by: str
    panel: str = ""
    x_label: str = ""
    y_label: str = ""
    logarithmic: bool = False
    by_label: str = ""
    panel_label: str = ""
    level: float | None = None  # a line across
    kind: Literal["lines", "points", "intervals"] = "lines"


def intervals(x_label: str) -> Figure:
    """Estimates with their intervals, by name."""
    return Figure("value", "", "of", "what", x_label, kind="intervals")


class Table(NamedTuple):
    """Rows of words under headings."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Answer:
    """Two plain sentences with their intervals, and every comparison behind them."""

    first: str
    second: str
    findings: Sequence[Finding] = ()
    table: Table | None = None  # where the findings are no differences or relations

    def behind(self) -> Table | None:
        """Table that the sentences rest on."""
        if self.table is not None or not self.findings:
            return self.table
        rows = [
            [one.what, one.of, str(one.estimate), one.estimate.shown_p, str(one.estimate.count), one.verdict]
            for one in self.findings
        ]
        return Table(("what", "of", "estimate [95 %]", "p (Holm)", "seeds or points", "verdict"), rows)


@dataclass(frozen=True)
class Study:
    """A question, what is measured for it, and what the rows say; `conclude` sees points and results in one dict."""

    question: str
    grid: Callable[[bool], Sequence[Point]]  # whether it is to be quick
    measure: Measure
    conclude: Callable[[list[Json]], Answer]
    figure: Figure
    budget: str
    doubt: str  # what would change our mind
    setting: str = ""  # of what size, how long, how tuned
    drawn: Sequence[str] = ()  # of a figure of intervals, what the findings are about
    shown: Callable[[list[Json]], list[Json]] = list  # what the figure draws, if not the rows themselves
    # Rows of losses by condition, arm and seed, where they are of trained models: `floors` judges them.
    judged: Callable[[list[Json]], list[Json]] | None = None
    controls: Sequence[str] = ()  # arms of the floors that `conclude` is to see


def find_study(name: str) -> Study:
    """The study of that name."""
    if name not in STUDIES:
        raise BadArguments(f"no study is called {name!r}: choose one of {', '.join(STUDIES)}")
    return import_module(f".{name.replace('-', '_')}", __package__).STUDY


def flat(rows: Sequence[Row]) -> list[Json]:
    """Flatten the measurements, without the failures; a point with several results gives several."""
    found = []
    for row in rows:
        if "result" in row:
            results = row["result"] if isinstance(row["result"], list) else [row["result"]]
            found += [row["point"] | result for result in results]
    return found


def document(name: str, rows: Sequence[Row], *, num_points: int) -> Json:
    """Summarise a study so far, as the page and the documentation read it."""
    study = find_study(name)
    with as_written(f"the rows of {name}"):
        measured = flat(rows)
        below = floors(study.judged(measured)) if study.judged else []
        told = _above_floors(measured, below, study.controls) if study.judged else measured
        found = study.conclude(told) if told else None
        table = found.behind() if found else None
    answer = [found.first, found.second] if found else [] if measured else ["Nothing has been measured yet."]
    answer += _refused(below)
    done = sum("result" in row for row in rows)
    if done < num_points:
        answer.append(f"Open: {num_points - done} of {num_points} points are not measured to their end.")
    return {
        "schema": "locater.study/1",
        "study": name,
        "question": study.question,
        "number": STUDIES[name],
        "setting": study.setting,
        "answer": answer,
        "findings": [one.to_json() for one in found.findings] if found else [],
        "behind": table._asdict() if table else None,
        "floors": [str(one) for one in below],
        "budget": study.budget,
        "doubt": study.doubt,
        "figure": asdict(study.figure),
        "failures": [row for row in rows if "error" in row],
        "rows": study.shown(told) if study.figure.kind != "intervals" else _drawn(study, found),
    }


def _above_floors(rows: list[Json], below: Sequence[Floors], controls: Sequence[str]) -> list[Json]:
    """Rows of the conditions in which attention matters, without the arms that showed it unless they are controls."""
    enough = {one.condition for one in below if not one.shortfall}
    floors = set(FLOORS) - set(controls)
    return [row for row in rows if row.get("condition", "") in enough and row["arm"] not in floors]


def _refused(below: Sequence[Floors]) -> list[str]:
    """A sentence for each reason why nothing is concluded, with the conditions that it holds of."""
    reasons: dict[str, list[str]] = {}
    for one in below:
        if one.shortfall:
            reasons.setdefault(one.shortfall, []).append(one.condition)
    return [f"No conclusion{_on(conditions, len(below))}: {reason}." for reason, conditions in reasons.items()]


def _on(conditions: Sequence[str], total: int) -> str:
    if not any(conditions):
        return ""
    return f" on any of {total} settings" if len(conditions) == total > 1 else f" on {together(conditions)}"


def _drawn(study: Study, found: Answer | None) -> list[Json]:
    """The findings of a figure of intervals."""
    some = [one for one in found.findings if one.what in study.drawn] if found else []
    return [one.to_json() | {"seen": one.estimate.is_seen} for one in some]


def measure_for(sweep: Sweep) -> Measure:
    """By what the points of a sweep are measured: a study's own function, or the trainer."""
    if sweep.kind == "train":
        from .trained import measure

        return measure
    return find_study(sweep.kind.removeprefix("study ")).measure


def points_of(name: str, *, quick: bool) -> list[Point]:
    return list(find_study(name).grid(quick))


def kind_of(name: str) -> str:
    return f"study {name}"


def default_folder(name: str, *, quick: bool) -> Path:
    return Path("studies") / (name + ("-quick" if quick else ""))
