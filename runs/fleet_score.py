"""`python runs/fleet_score.py`: precision, recall and lead time of alarms and forecasts on the fleet, and its remedies.

Whatever is chosen is chosen on the even seeds and judged on the odd ones. A run has diverged if it ends 0.1 nats or
more above the median of the calm runs of its kind, or with a loss that is not finite.
"""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from locater.records import Json

FOLDER = Path(__file__).parent / "measured" / "fleet"
WORSE = 0.1  # nats
SERIOUS = ("logit explosion", "entropy collapse", "rank collapse", "not finite")
RESTING = ("dead heads (sink)", "dead heads (uniform)")
NUMBERS = {"normalised entropy": 1, "residual": 2, "σ₁": 3, "log n": 5, "not finite": 6}  # places in a layer's row
LAMBDA = 4.0  # √ of the head's 16
LIMITS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)  # of σ₁ in units of λ
APART = 30  # steps between the reports that a forecast goes by


class Fleet:
    """The rows, by what became of them."""

    def __init__(self, rows: list[Json]) -> None:
        self.plain = [row for row in rows if not row["remedy"]]
        self.tried = [row for row in rows if row["remedy"]]
        kinds = {row["kind"] for row in self.plain}
        self.calm = {kind: self._course(kind) for kind in kinds}

    def _course(self, kind: str) -> list[float]:
        courses = [row["losses"] for row in self.plain if row["kind"] == kind and not row["wild"]]
        return [median(values) for values in zip(*courses, strict=True)]

    def has_diverged(self, row: Json) -> bool:
        return self.shown_at(row) is not None

    def shown_at(self, row: Json) -> int | None:
        """The step from which on the loss stays above that of the calm runs; None for a run that ends well."""
        losses, calm = row["losses"], self.calm[row["kind"]]
        if len(losses) < len(calm) or None in losses:
            return 10 * (losses.index(None) if None in losses else len(losses))
        worse = [loss > usual + WORSE for loss, usual in zip(losses, calm, strict=True)]
        return None if not worse[-1] else 10 * (max([n for n, one in enumerate(worse) if not one], default=-1) + 1)

    def half(self, is_fit: bool) -> list[Json]:
        return [row for row in self.plain if (row["seed"] % 2 == 0) == is_fit]


def score(fleet: Fleet, rows: Iterable[Json], first_alarm: dict[int, int | None]) -> Json:
    """Of runs: how many alarmed ones diverge, how many that diverge are alarmed, and how long before the loss shows."""
    rows = list(rows)
    alarmed = [row for row in rows if first_alarm[id(row)] is not None]
    wrong = [row for row in rows if fleet.has_diverged(row)]
    both = [row for row in alarmed if fleet.has_diverged(row)]
    leads = [(fleet.shown_at(row) or 0) - (first_alarm[id(row)] or 0) for row in both]
    return {
        "alarmed": len(alarmed), "diverged": len(wrong), "both": len(both), "lead": median(leads) if leads else math.nan
    }  # fmt: skip


def line(name: str, found: Json) -> str:
    lead = "–" if math.isnan(found["lead"]) else f"{found['lead']:.0f} steps"
    return f"| {name} | {found['both']} of {found['alarmed']} | {found['both']} of {found['diverged']} | {lead} |"


def by_limit(rows: Iterable[Json], factor: float) -> dict[int, int | None]:
    """The first report with a logit above this many log n, of each run."""
    found: dict[int, int | None] = {}
    for row in rows:
        steps = [
            report["step"]
            for report in row["reports"]
            if any(_top(layer) > factor * max(1.0, layer[NUMBERS["log n"]]) for layer in report["layers"])
        ]
        found[id(row)] = steps[0] if steps else None
    return found


def _top(layer: list) -> float:
    return max(math.inf if value is None else value for value in layer[0])


def by_kind(rows: Iterable[Json], *kinds: str, every: int = 10) -> dict[int, int | None]:
    """The first report of every so many steps with one of these alarms."""
    return {
        id(row): next(
            (one["step"] for one in row["reports"] if one["step"] % every == 0 and {*kinds} & {*one["alarms"]}), None
        )
        for row in rows
    }


def forecasts(row: Json, *, least: float, fastest: float, factor: float = 10.0) -> list[bool]:
    """Every dated forecast of a run, and whether it came true: within twice the time that was said.

    `least` of the limit must be reached; `fastest` is how many steps ahead at most. The first of each head counts;
    one that is due after the end does not.
    """
    reports = [report for report in row["reports"] if report["step"] % APART == 0]
    found = []
    for number, layer in enumerate(reports[0]["layers"] if reports else ()):
        for head in range(len(layer[0])):
            course = [
                (one["step"], one["layers"][number][0][head], one["layers"][number][NUMBERS["log n"]])
                for one in row["reports"]
            ]
            answer = _first_forecast(course, least, fastest, factor)
            found += [] if answer is None else [answer]
    return found


def _first_forecast(course: list, least: float, fastest: float, factor: float) -> bool | None:
    spaced = [point for point in course if point[0] % APART == 0]
    for before, middle, now in zip(spaced, spaced[1:], spaced[2:], strict=False):
        values, limit = [before[1], middle[1], now[1]], factor * max(1.0, now[2])
        if None in values or values[2] > limit:
            return None
        if not (0 < values[0] < values[1] < values[2]) or values[2] < least * limit:
            continue
        steps = math.log(limit / values[2]) / (math.log(values[2] / values[1]) / APART)
        if steps > fastest:
            continue
        due = now[0] + 2 * steps
        if due > course[-1][0]:
            continue
        return any(value is None or value > limit for step, value, _ in course if now[0] < step <= due)
    return None


def by_weights(rows: Iterable[Json], limit: float, every: int) -> dict[int, int | None]:
    """The first of every so many steps at which a layer's largest σ₁(W) is beyond the limit: a checkpoint's scan."""
    return {
        id(row): next(
            (
                report["step"]
                for report in row["reports"]
                if report["step"] % every == 0 and any(_sigma(layer) > limit for layer in report["layers"])
            ),
            None,
        )
        for row in rows
    }


def _sigma(layer: list) -> float:
    value = layer[NUMBERS["σ₁"]]
    return math.inf if value is None else value / LAMBDA


def chosen_limit(fleet: Fleet, rows: list[Json]) -> float:
    """Of limits whose alarmed runs diverge in four of five, the one that finds most; the highest of those."""
    found = {limit: score(fleet, rows, by_weights(rows, limit, 10)) for limit in LIMITS}
    fair = {limit: one["both"] for limit, one in found.items() if one["both"] >= 0.8 * one["alarmed"]}
    return max(fair, key=lambda limit: (fair[limit], limit))


def main(*, folder: Path) -> None:
    rows = [json.loads(one) for one in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    fleet = Fleet(rows)
    fit, judged = fleet.half(True), fleet.half(False)
    print(f"{len(fleet.plain)} runs, {sum(map(fleet.has_diverged, fleet.plain))} diverge\n")
    print("| alarm (odd seeds) | alarmed runs that diverge | diverging runs alarmed | lead |\n|---|---|---|---|")
    print(line("any of the first four", score(fleet, judged, by_kind(judged, *SERIOUS))))
    for kind in (*SERIOUS, *RESTING):
        print(line(kind, score(fleet, judged, by_kind(judged, kind))))
    limit = chosen_limit(fleet, fit)
    for every in (10, 50):
        print(line(f"σ₁(W) > {limit:g} λ, every {every} steps", score(fleet, judged, by_weights(judged, limit, every))))
    print(line("logit explosion, every 50 steps", score(fleet, judged, by_kind(judged, "logit explosion", every=50))))
    for factor in (2, 3, 5, 10, 20, 50):
        both = [score(fleet, half, by_limit(half, factor)) for half in (fit, judged)]
        print(line(f"largest logit > {factor} log n, even seeds", both[0]))
        print(line(f"largest logit > {factor} log n, odd seeds", both[1]))
    print("\n| forecast | even seeds | odd seeds |\n|---|---|---|")
    for least in (0.25, 0.5, 0.75):
        for fastest in (30, 60, 120):
            counts = [
                [one for row in half for one in forecasts(row, least=least, fastest=fastest)] for half in (fit, judged)
            ]
            words = [f"{sum(part)} of {len(part)}" for part in counts]
            print(f"| above {least:g} of the limit, within {fastest} steps | {words[0]} | {words[1]} |")
    _print_remedies(fleet)


def _print_remedies(fleet: Fleet) -> None:
    plain = {(row["kind"], row["seed"]): row for row in fleet.plain if row["wild"]}
    print("\n| at the first serious alarm | tried on | ended well | median change of the loss |\n|---|---|---|---|")
    for remedy in dict.fromkeys(row["remedy"] for row in fleet.tried):
        rows = [row for row in fleet.tried if row["remedy"] == remedy and row["begun"] is not None]
        rows = [row for row in rows if fleet.has_diverged(plain[row["kind"], row["seed"]])]
        saved = sum(not fleet.has_diverged(row) for row in rows)
        ends = [(row["losses"][-1], plain[row["kind"], row["seed"]]["losses"][-1]) for row in rows]
        change = median((math.inf if a is None else a) - (b or 0.0) for a, b in ends) if ends else math.nan
        print(f"| {remedy} | {len(rows)} | {saved} | {change:+.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    main(**vars(parser.parse_args()))
