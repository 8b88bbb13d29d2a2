"""The paper's model to the end: validation every 500 steps until none has improved for 3,000."""

import math

from ..records import Json
from ..training.data.text import WIKITEXT
from .statistics import FEWEST, together
from .study import Answer, Figure, Study
from .sweep.folder import Point
from .trained import at_common_step, findings, measure, points, ratio

ARMS = {
    "none": {},
    "locater-1e-2": {"strength": 1e-2},
    "locater-2.5e-3": {"strength": 2.5e-3},
    "decay-2": {"qk_decay": 2.0},
    "decay-8": {"qk_decay": 8.0},
}
QUICK: Json = dict(data="embedded", tokenizer="bpe", bpe_size=512, context=32, d_model=32, d_feedforward=32)
QUICK |= dict(steps=400, patience=120, learning_rate=1e-2, warmup=20, batch=8, validate_every=60)
QUICK |= dict(validation_windows=64, save_every=60)
# What the question asks for: the perplexity of LocAteR over that of no regulariser.
WANTED = 0.95


def grid(quick: bool) -> list[Point]:
    full: Json = dict(data=WIKITEXT, tokenizer="bpe", bpe_size=4096, steps=60_000, patience=3000)
    common = QUICK if quick else full
    arms = {name: ARMS[name] for name in ("none", "locater-1e-2")} if quick else ARMS
    conditions = {"": {}} if quick else {"": {}, "dropout 0.1": {"dropout": 0.1}}
    return points(arms, seeds=range(3), preset="paper", common=common, conditions=conditions)


def conclude(rows: list[Json]) -> Answer:
    """At the end of all runs; or, while some are under way, at the last step that the most complete seeds share."""
    where, further = "at the end", ""
    if not all(row.get("is_done", True) for row in rows):
        further = _furthest(rows)
        step, rows = at_common_step(rows)
        where = f"at step {step:,}, the last that all have reached (not all runs have ended: open),"
    said = [_told(rows, arm) for arm in dict.fromkeys(row["arm"] for row in rows if row["arm"].startswith("locater"))]
    found = findings(rows, "best_loss", "best validation loss")
    return Answer(
        f"The paper's model with byte pairs {where} is with {together(said) or 'no LocAteR'} times the perplexity "
        "of none (paired, 95 %).",
        f"Whether that is {WANTED} or less: {_verdict(rows)}{further}.",
        found,
    )


def _furthest(rows: list[Json]) -> str:
    """Of the seed whose two runs have come furthest together: one seed, so no claim, but where it goes."""
    best = (0, 0, 0.0)
    for arm, seed in dict.fromkeys((row["arm"], row["seed"]) for row in rows if row["arm"].startswith("locater")):
        pair = [row for row in rows if row["seed"] == seed and row["arm"] in ("none", arm) and not row["condition"]]
        if len(pair) == 2:
            step, both = at_common_step(pair)
            losses = {row["arm"]: row["best_loss"] for row in both}
            best = max(best, (step, seed, math.exp(losses[arm] - losses["none"])))
    return f"; seed {best[1]} alone has come to step {best[0]:,}, where it is at {best[2]:.3f}" if best[0] else ""


def _told(rows: list[Json], arm: str) -> str:
    one = ratio(rows, arm)
    interval = f" [{one.low:.3f}, {one.high:.3f}]" if one.count >= FEWEST else " without an interval"
    return f"{arm} at {one.value:.3f}{interval} ({one.count} seed{'s' if one.count != 1 else ''})"


def _verdict(rows: list[Json]) -> str:
    """Of the best arm that enough seeds stand behind."""
    found = [ratio(rows, arm) for arm in dict.fromkeys(row["arm"] for row in rows if row["arm"].startswith("locater"))]
    found = [one for one in found if one.count >= FEWEST]
    if not found:
        return "open, for fewer than three seeds have come that far"
    if any(one.high <= WANTED for one in found):
        return "yes"
    return "no" if all(one.low > WANTED for one in found) else "not settled, the interval holds it"


STUDY = Study(
    question="Trained until nothing improves, does LocAteR end at 0.95 times the perplexity or less?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("best_step", "best_loss", "arm", "condition", "step of the best validation", "its loss"),
    budget="30 runs of some 20,000 steps: about 12 hours of one core (quick: two minutes)",
    doubt="QK-norm, tuned alike, and word level; both are left out here.",
)
