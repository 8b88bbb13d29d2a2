"""Intervene on localisation itself: windows, temperatures, and a mean or a scale held while the other varies."""

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import fmean

from locater.records import Json

from .floors import ARMS as FLOORS
from .interventions import HeldAttention, Temperature, Window, far
from .small import STEPS, TRAINED_SCALE, Attach, arms_by_seed, nothing, read_study_text, result, train_small, trained
from .statistics import FEWEST, Finding, MeanEstimate, corrected, seed_means, spearman_estimate, tally
from .study import Answer, Figure, Study
from .sweep.folder import Point
from .trained import findings

ETA = 0.3  # what is held while ξ varies


# By kind: what is set, and to what.
KINDS: dict[str, dict[str, Attach]] = {
    "window": {f"window {size}": partial(Window, size=size) for size in (2, 8)},
    "temperature": {f"temperature {factor:g}": partial(Temperature, factor=factor) for factor in (0.3, 3)},
    "ξ at equal η": {f"ξ {xi:g} at η {ETA:g}": partial(HeldAttention, xi=xi, eta=ETA) for xi in (-2, 2)},
}
ARMS: dict[str, Attach] = {"none": nothing} | {name: make for kind in KINDS.values() for name, make in kind.items()}
ARMS |= FLOORS
KIND_OF = {name: kind for kind, arms in KINDS.items() for name in arms} | {name: name for name in ("none", *FLOORS)}
CHOSEN = {"text": tuple(ARMS), "far tokens": ("none", "window 2", "window 8", "temperature 3", *FLOORS)}
# Text wants what is near; tokens that stood half a text before want what is far.
TASKS = {"text": read_study_text, "far tokens": far}


def grid(quick: bool) -> list[Point]:
    return arms_by_seed(CHOSEN, quick=quick, short=60)


def measure(point: Point, place: Path) -> Json:
    ran = train_small(trained(point["seed"], point["steps"]), ARMS[point["arm"]], task=TASKS[point["condition"]])
    return result(ran) | {"kind": KIND_OF[point["arm"]]}


def follows(rows: Iterable[Json], x: str, y: str = "best_loss") -> MeanEstimate:
    """Spearman over arms of one quantity with another, means over seeds, which are no more arms; of too few nothing."""
    rows = [row for row in rows if x in row and y in row]
    if len({row["seed"] for row in rows}) < FEWEST:
        return MeanEstimate(math.nan, -1.0, 1.0, 1.0, 0)
    means = seed_means(rows, ("arm",), (x, y))
    return spearman_estimate([one[x] for one in means], [one[y] for one in means])


def conclude(rows: list[Json]) -> Answer:
    """Relate the loss to where attention looks, over arms that were made to differ in it, by task and by kind."""
    relations = corrected([one for task in TASKS for one in _relations(rows, task)])
    losses = findings(rows, "best_loss", "validation loss")
    near = [row["near_mass"] for row in rows]
    of_near, of_entropy = ([one for one in relations if one.what.endswith(word)] for word in ("near mass", "entropy"))
    return Answer(
        f"With the mass on the last 4 tokens set from {min(near):.2f} to {max(near):.2f}, the loss over it: "
        f"{tally(of_near)}; over entropy: {tally(of_entropy)} (rank correlations over arms, means over seeds, Holm).",
        f"Against a model that is left alone, the loss: {tally(losses)} (paired by seed, Holm).",
        [*relations, *losses],
    )


def _relations(rows: list[Json], task: str) -> list[Finding]:
    some = [row for row in rows if row["condition"] == task]
    return [
        Finding(f"loss over {word}", task, follows(some, x), "relation")
        for x, word in (("near_mass", "near mass"), ("entropy", "entropy"))
        if some
    ]


def by_arm(rows: list[Json]) -> list[Json]:
    """A point for each task and arm: means over seeds, the loss against none's of the same seed."""
    none = {(row["condition"], row["seed"]): row["best_loss"] for row in rows if row["arm"] == "none"}
    found = []
    for task, arm in dict.fromkeys((row["condition"], row["arm"]) for row in rows):
        some = [row for row in rows if (row["condition"], row["arm"]) == (task, arm) and (task, row["seed"]) in none]
        if some:
            losses = [row["best_loss"] - none[task, row["seed"]] for row in some]
            point = {"task": task, "arm": arm, "kind": some[0]["kind"]}
            near = fmean(row["near_mass"] for row in some)
            found.append(point | {"near_mass": near, "difference": fmean(losses)})
    return found


STUDY = Study(
    question="If localisation is set from outside, does the loss follow it, or does it only accompany a small scale?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure(
        "near_mass",
        "difference",
        "kind",
        "task",
        "mass on the last 4 tokens",
        "validation loss minus none's",
        by_label="what is set",
        level=0.0,
        kind="points",
    ),
    shown=by_arm,
    budget=f"63 runs of {STEPS:,} steps",
    setting=f"{TRAINED_SCALE}; far tokens: 64 words, each standing again half a text later",
    judged=list,
    doubt="Models of several layers, in which few heads need be local.",
)
