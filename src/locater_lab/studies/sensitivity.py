"""LocAteR's gain over learning rate, norm placement, positions and width, one at a time."""

from dataclasses import replace
from pathlib import Path

from locater.records import Json
from locater.stabilisers import LocAteR

from .floors import ARMS as FLOORS
from .floors import UNIFORM
from .small import STEPS, TRAINED_SCALE, arms_by_seed, nothing, result, train_small, trained
from .statistics import Finding, MeanEstimate, corrected, paired, tally
from .study import Answer, Study, intervals
from .sweep.folder import Point
from .trained import by_seed, findings

ARMS = {"none": nothing, "locater": lambda model: LocAteR(model, strength="auto"), UNIFORM: FLOORS[UNIFORM]}
AS_IT_IS = "as it is"
FACTORS: dict[str, Json] = {
    AS_IT_IS: {},
    "learning rate × 3": {"learning_rate": 1.5e-2},
    "pre-LN": {"norm_first": True},
    "learning rate / 3": {"learning_rate": 1.7e-3},
    "rotary": {"positions": "rotary"},
    "half the width": {"d_model": 32, "d_feedforward": 64},
}


def grid(quick: bool) -> list[Point]:
    return arms_by_seed(dict.fromkeys(tuple(FACTORS)[: 3 if quick else None], ARMS), quick=quick, short=80)


def measure(point: Point, place: Path) -> Json:
    options = {"steps": point["steps"]} | FACTORS[point["condition"]]
    return result(train_small(trained(point["seed"], **options), ARMS[point["arm"]]))


def conclude(rows: list[Json]) -> Answer:
    """The gain of each setting, and whether it differs from the gain as it is."""
    gains = findings(rows, "best_loss", "loss, LocAteR − none")
    gains = [replace(one, of=one.of.removeprefix("locater with ")) for one in gains]
    changes = corrected(
        [Finding("its change against 'as it is'", factor, _change_of_gain(rows, factor)) for factor in _others(rows)]
    )
    return Answer(
        f"With one thing changed at a time, the loss with LocAteR (κ = auto) against none: {tally(gains)} (paired by "
        "seed, Holm).",
        f"That difference, against the one of the model as it is: {tally(changes)}.",
        [*gains, *changes],
    )


def _others(rows: list[Json]) -> list[str]:
    return [name for name in dict.fromkeys(row["condition"] for row in rows) if name != AS_IT_IS]


def _change_of_gain(rows: list[Json], factor: str) -> MeanEstimate:
    gains = {}
    for name in (factor, AS_IT_IS):
        with_it, without = (by_seed(rows, name, arm, "best_loss") for arm in ("locater", "none"))
        gains[name] = {seed: with_it[seed] - without[seed] for seed in with_it.keys() & without.keys()}
    return paired(gains[factor], gains[AS_IT_IS])


STUDY = Study(
    question="Does LocAteR's gain depend on learning rate, norm placement, positions or width?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=intervals("estimate and its interval"),
    drawn=("loss, LocAteR − none",),
    budget=f"72 runs of {STEPS:,} steps",
    setting=TRAINED_SCALE,
    judged=list,
    doubt="A strength tuned for every factor; factors in combination; heads, batch and learned positions.",
)
