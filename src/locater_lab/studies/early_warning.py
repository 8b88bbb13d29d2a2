"""Early warning of divergence by the monitor's numbers: recall, false alarms and lead time over every threshold."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

from locater.monitor import AttentionMonitor, Report
from locater.records import Json
from locater.stabilisers import Stabiliser

from ..train.model import LanguageModel
from .small import around, said, tiny, train
from .statistics import capital, wilson
from .study import Answer, Figure, Study, Table
from .sweep.folder import Point

# The learning rate climbs from 0 to its top over the whole run: what breaks, breaks on the way and not at once.
TOPS = (0.01, 0.1, 1.0, 3.0)
KINDS: dict[str, Json] = {
    "post-LN": {},
    "pre-LN": {"norm_first": True},
    "no clipping": {"norm_first": True, "clip": 0.0},
    "fast moments": {"beta2": 0.9},
    "rotary": {"positions": "rotary"},
    "three layers": {"num_layers": 3},
}
EVERY = 10  # steps between reports
RISE = 0.3  # nats of the smoothed loss above its lowest, to the end: then it shows
ALLOWED = 0.1  # share of healthy runs that may be alarmed


def _worst(pick: Callable[[Iterable[float]], float], where: str, name: str) -> Callable[[Report], float]:
    def read(report: Report) -> float:
        values = [
            value for layer in report.training for value in getattr(layer, where).get(name, ()) if not math.isnan(value)
        ]
        return pick(values) if values else math.nan

    return read


def _residual(report: Report) -> float:
    return min((layer.ranks.get("residual", math.nan) for layer in report.training), default=math.nan)


# Each as a number that is high when it is bad.
INDICATORS: dict[str, Callable[[Report], float]] = {
    "largest logit": _worst(max, "statistics", "max_logit"),
    "low entropy": lambda report: -_worst(min, "statistics", "normalised_entropy")(report),
    "η": _worst(max, "weights", "eta"),
    "σ₁": _worst(max, "weights", "sigma_1"),
    "growth of the largest logit": _worst(max, "weights", "max_logit_growth"),
    "growth of η": _worst(max, "weights", "eta_growth"),
    "growth of σ₁": _worst(max, "weights", "sigma_1_growth"),
    "size of the update": _worst(max, "weights", "update_ratio"),
    "few directions in the update": lambda report: -_worst(min, "weights", "update_stable_rank")(report),
    "low entropy of the update": lambda report: -_worst(min, "weights", "update_entropy")(report),
    "low residual": lambda report: -_residual(report),
}
LOSS = "the loss itself"
DEFAULTS = "alarms of the monitor"


def grid(quick: bool) -> list[Point]:
    kinds, steps = (("post-LN", "pre-LN"), 100) if quick else (tuple(KINDS), 300)
    return [
        {"name": f"{kind}-{top:g}-seed{seed}", "kind": kind, "top": top, "seed": seed, "steps": steps}
        for seed in range(3)
        for kind in kinds
        for top in TOPS
    ]


def measure(point: Point, place: Path) -> Json:
    """The course of every indicator, report by report, the default alarms' first steps, and where the loss shows it."""
    steps = point["steps"]
    options = dict(learning_rate=point["top"], schedule="constant", warmup=steps, steps=steps) | KINDS[point["kind"]]
    reports: list[Report] = []
    monitors: list[AttentionMonitor] = []

    def each(step: int, loss: float, model: object) -> None:
        report = monitors[0].step()
        if report is not None:
            reports.append(report)

    def attach(model: LanguageModel) -> Stabiliser:
        monitors.append(AttentionMonitor(model, every=EVERY))
        return Stabiliser()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran = train(tiny(point["seed"], **options), attach, each=each)
    monitors[0].detach()
    alarms = [report.step for report in reports if report.alarms]
    return {
        "shown": shown_at(ran.losses, steps),
        "steps": [report.step for report in reports],
        "courses": {name: [_kept(read(report)) for report in reports] for name, read in INDICATORS.items()}
        | {LOSS: rises(ran.losses, [report.step for report in reports])},
        "first_alarm": alarms[0] if alarms else None,
        "kinds_of_alarm": sorted({alarm.kind for report in reports for alarm in report.alarms}),
    }


def _kept(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean over the last ten steps."""
    return [sum(losses[max(0, end - EVERY) : end]) / min(end, EVERY) for end in range(1, len(losses) + 1)]


def rises(losses: Sequence[float], steps: Sequence[int]) -> list[float | None]:
    """Height of the smoothed loss above its lowest so far, at some steps."""
    means, lowest, found = smoothed(losses), math.inf, []
    for value in means:
        lowest = min(lowest, value)
        found.append(value - lowest)
    return [_kept(found[step]) if step < len(found) else None for step in steps]


def shown_at(losses: Sequence[float], num_steps: int) -> int | None:
    """The first step from which on the smoothed loss stays above its lowest by `RISE`; None for a healthy run.

    >>> shown_at([5.0] * 20 + [6.0] * 40, 60)
    23
    >>> shown_at([5.0] * 60, 60)
    """
    means = smoothed(losses)
    if len(losses) < num_steps or not math.isfinite(means[-1]):  # a loss that is no number ends a run
        means = [*[value for value in means if math.isfinite(value)], math.inf]
    lowest, since = math.inf, None
    for step, value in enumerate(means):
        lowest = min(lowest, value)
        since = (step if since is None else since) if value > lowest + RISE else None
    return since


def first_above(course: Sequence[float | None], steps: Sequence[int], threshold: float) -> int | None:
    """The first step at which an indicator is above a threshold."""
    return next(
        (step for step, value in zip(steps, course, strict=True) if value is not None and value > threshold), None
    )


def judged(rows: list[Json], name: str, threshold: float) -> Json:
    """Recall, false alarms, and the median of the steps between alarm and loss where it came first."""
    bad, good = ([row for row in rows if (row["shown"] is not None) == is_bad] for is_bad in (True, False))
    leads = [_lead(row, name, threshold) for row in bad]
    caught = [lead for lead in leads if lead is not None and lead >= 0]
    false = sum(first_above(row["courses"][name], row["steps"], threshold) is not None for row in good)
    return {
        "threshold": threshold,
        "caught": len(caught),
        "diverged": len(bad),
        "false": false,
        "healthy": len(good),
        "lead": median(caught) if caught else None,
    }


def _lead(row: Json, name: str, threshold: float) -> int | None:
    at = first_above(row["courses"][name], row["steps"], threshold)
    return None if at is None else row["shown"] - at


def thresholds(rows: list[Json], name: str) -> list[float]:
    """Every value that separates two runs: the largest before the loss shows it, or of a whole healthy run."""
    return sorted({_largest(row, name) for row in rows} - {-math.inf})


def _largest(row: Json, name: str) -> float:
    end = math.inf if row["shown"] is None else row["shown"]
    known = [
        value
        for step, value in zip(row["steps"], row["courses"][name], strict=True)
        if value is not None and step <= end
    ]
    return max(known, default=-math.inf)


def chosen(rows: list[Json], name: str) -> float:
    """The lowest threshold with few enough false alarms: the most recall and lead that is to be had for them."""
    allowed = [
        value
        for value in thresholds(rows, name)
        if (found := judged(rows, name, value))["false"] <= ALLOWED * max(1, found["healthy"])
    ]
    return allowed[0] if allowed else math.inf


def cross_judged(rows: list[Json], name: str) -> Json:
    """Chosen on all seeds but one, judged on that one; sums over seeds."""
    parts = []
    for seed in sorted({row["seed"] for row in rows}):
        others, own = ([row for row in rows if (row["seed"] == seed) == is_own] for is_own in (False, True))
        parts.append(judged(own, name, chosen(others, name)))
    leads = [part["lead"] for part in parts if part["lead"] is not None]
    sums = {key: sum(part[key] for part in parts) for key in ("caught", "diverged", "false", "healthy")}
    return {"indicator": name, "lead": median(leads) if leads else None} | sums


def by_default(rows: list[Json]) -> Json:
    """Replay the monitor's own alarms at their own thresholds."""
    bad, good = ([row for row in rows if (row["shown"] is not None) == is_bad] for is_bad in (True, False))
    leads = [row["shown"] - row["first_alarm"] for row in bad if row["first_alarm"] is not None]
    caught = [lead for lead in leads if lead >= 0]
    false = sum(row["first_alarm"] is not None for row in good)
    numbers = {"caught": len(caught), "diverged": len(bad), "false": false, "healthy": len(good)}
    return {"indicator": DEFAULTS, "lead": median(caught) if caught else None} | numbers


def curves(rows: list[Json]) -> list[Json]:
    """Recall over the share of false alarms, threshold by threshold, for every indicator."""
    found = []
    for name in (*INDICATORS, LOSS):
        for value in thresholds(rows, name):
            one = judged(rows, name, value)
            shares = {
                "recall": one["caught"] / max(1, one["diverged"]),
                "false_alarms": one["false"] / max(1, one["healthy"]),
            }
            found.append({"indicator": name, "threshold": value, "lead": one["lead"]} | shares)
    return found


def conclude(rows: list[Json]) -> Answer:
    judgements = [cross_judged(rows, name) for name in (*INDICATORS, LOSS)]
    judgements.sort(key=lambda one: (-one["caught"], one["false"], -(one["lead"] or 0)))
    own, loss = by_default(rows), next(one for one in judgements if one["indicator"] == LOSS)
    best = next(one for one in judgements if one["indicator"] != LOSS)
    limits = around(lambda name, threshold: judged(rows, name, threshold))
    return Answer(
        f"{capital(best['indicator'])} warns best: {_share(best, 'caught', 'diverged')} divergences are caught, "
        f"{_steps(best)} before the loss shows them, with {_share(best, 'false', 'healthy')} healthy runs alarmed; the "
        f"rise of the loss itself catches {loss['caught']}, {_steps(loss)} before.",
        f"The monitor's alarms at their own thresholds catch {_share(own, 'caught', 'diverged')}, {_steps(own)} "
        f"before, with {_share(own, 'false', 'healthy')} healthy runs alarmed ({_at_lowest(rows)}); "
        f"{said(limits)}.",
        table=_table([*judgements, own], rows, limits),
    )


def _at_lowest(rows: list[Json]) -> str:
    """False alarms where nothing at all is wrong; others are of attention that broke without the loss."""
    lowest = min(row["top"] for row in rows)
    calm = [row for row in rows if row["top"] == lowest and row["shown"] is None]
    return f"{sum(row['first_alarm'] is not None for row in calm)} of {len(calm)} at the lowest rate"


def _share(one: Json, part: str, whole: str) -> str:
    low, high = wilson(one[part], one[whole])
    return f"{one[part]} of {one[whole]} [{low:.0%}, {high:.0%}]"


def _steps(one: Json) -> str:
    return "no step" if one["lead"] is None else f"a median of {one['lead']:g} steps"


def _table(judgements: list[Json], rows: list[Json], limits: list[Json]) -> Table:
    lines = [_line(one, chosen(rows, one["indicator"])) for one in judgements if one["indicator"] != DEFAULTS]
    lines += [_line(one, None) for one in judgements if one["indicator"] == DEFAULTS]
    lines += [_line(one, one["threshold"]) for one in limits]
    return Table(("indicator", "threshold (all seeds)", "caught", "false alarms", "median lead"), lines)


def _line(one: Json, value: float | None) -> list[str]:
    lead = "–" if one["lead"] is None else f"{one['lead']:g}"
    shown = "its own" if value is None else "none" if math.isinf(value) else f"{value:.3g}"
    return [one["indicator"], shown, _share(one, "caught", "diverged"), _share(one, "false", "healthy"), lead]


STUDY = Study(
    question="Which number of the monitor sees a divergence coming, how often, and how many steps before the loss?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure(
        "false_alarms", "recall", "indicator", "", "share of healthy runs alarmed", "share of divergences caught"
    ),
    budget="72 runs of 300 steps, a report every 10: some 4 minutes of one core",
    setting="tiny models of one to three layers whose learning rate climbs for 300 steps; thresholds are chosen on all "
    "seeds but one and judged on that one; Wilson's intervals",
    doubt="Divergences that come from elsewhere than too large a learning rate; models with more than three layers.",
    shown=curves,
)
