"""Stabilisers at one budget: as many trials to tune each, then learning rates up to divergence."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from locater.records import Json
from locater.stabilisers import LocAteR, QKClip, QKNorm, SigmaReparam, Stabiliser

from .floors import NONE, UNIFORM
from .interventions import Temperature
from .small import STEPS, TRAINED_SCALE, Attach, Ran, result, seeds, train_small, trained, validation_loss
from .statistics import Finding, corrected, paired, tally, together
from .study import Answer, Study, intervals
from .sweep.folder import Point

# From below the best rate of `none` to where its attention grows without need (runs/candidates.py).
RATES = (3.5e-3, 7e-3, 1.4e-2, 2.8e-2)
BASE = 7e-3  # the learning rate at which settings are tuned
TUNING = 1000  # the seed on which settings are chosen; none is judged by it


class Rival(NamedTuple):
    """Recipe of a stabiliser with a setting, and the settings that are tried; without any, weight decay is tuned."""

    make: Attach
    settings: tuple[float, ...] = ()

    @property
    def tried(self) -> tuple[float, ...]:
        return self.settings or (0.0, 0.01, 0.03, 0.1, 0.3)


RIVALS: dict[str, Rival] = {
    NONE: Rival(lambda model, setting: Stabiliser()),
    "LocAteR": Rival(lambda model, setting: LocAteR(model, strength=setting), (1e-4, 1e-3, 1e-2, 1e-1, 1.0)),
    "QK-norm": Rival(lambda model, setting: QKNorm(model)),
    "QK-Clip": Rival(lambda model, setting: QKClip(model, threshold=setting), (1.0, 3.0, 10.0, 30.0, 100.0)),
    "σReparam": Rival(lambda model, setting: SigmaReparam(model, gain=setting), (0.25, 0.5, 1.0, 2.0, 4.0)),
    UNIFORM: Rival(lambda model, setting: Temperature(model, 1e-6)),
}


def grid(quick: bool) -> list[Point]:
    names = (NONE, "LocAteR", "QK-norm", UNIFORM) if quick else tuple(RIVALS)
    rates = RATES[1:3] if quick else RATES
    return [
        {"name": f"{name}-seed{seed}", "arm": name, "seed": seed, "rates": list(rates), "steps": 60 if quick else STEPS}
        for seed in seeds(quick)
        for name in names
    ]


def measure(point: Point, place: Path) -> list[Json]:
    """Tune at one learning rate on another seed, then train at all with the setting that won."""
    rival, steps = RIVALS[point["arm"]], point["steps"]
    setting = tuned(point["arm"], steps)
    return [_row(rival, setting, rate, point["seed"], steps) for rate in point["rates"]]


@cache
def tuned(arm: str, steps: int) -> float:
    """The setting with the least loss, of as many trials for each arm."""
    rival = RIVALS[arm]
    trials = {one: validation_loss(_run(rival, one, BASE, TUNING, steps)) for one in rival.tried}
    return min(trials, key=trials.__getitem__)


def _run(rival: Rival, setting: float, rate: float, seed: int, steps: int) -> Ran:
    options = {"optimizer": "adamw", "weight_decay": 0.0 if rival.settings else setting}
    config = trained(seed, steps, learning_rate=rate, **options)
    return train_small(config, lambda model: rival.make(model, setting))


def _row(rival: Rival, setting: float, rate: float, seed: int, steps: int) -> Json:
    ran = _run(rival, setting, rate, seed, steps)
    found = result(ran) | {"learning_rate": rate, "setting": setting, "start": ran.losses[0]}
    return found | {"loss": found["best_loss"], "milliseconds": 1000 * ran.seconds / len(ran.losses)}


def sensitivity(losses: Sequence[float], start: float) -> float:
    """Mean over learning rates of min(loss, loss of the start) − best loss (Wortsman et al. 2023, arXiv 2309.14322).

    >>> sensitivity([2.0, 1.0, 9.0], start=4.0)
    1.3333333333333333
    """
    best = min(losses)
    return fmean(min(loss, start) - best if math.isfinite(loss) else start - best for loss in losses)


def _by_seed(rows: list[Json], arm: str) -> dict[str, dict[int, float]]:
    """Best loss, mean loss over rates, sensitivity, entropy at the base rate and time of a step, seed by seed."""
    found: dict[str, dict[int, float]] = {name: {} for name in QUANTITIES}
    for seed in sorted({row["seed"] for row in rows if row["arm"] == arm}):
        some = [row for row in rows if (row["arm"], row["seed"]) == (arm, seed)]
        losses, base = (
            [row["loss"] for row in some],
            min(some, key=lambda row: abs(math.log(row["learning_rate"] / BASE))),
        )
        found["loss"][seed] = min(losses)
        start = fmean(row["start"] for row in some)
        found["mean loss"][seed] = min(losses) + sensitivity(losses, start)
        found["sensitivity"][seed] = sensitivity(losses, start)
        found["entropy"][seed] = base["entropy"]
        found["time"][seed] = fmean(row["milliseconds"] for row in some)
    return found


def at_best_rate(rows: list[Json]) -> list[Json]:
    """The row of the least loss of every arm and seed, for the floors."""
    best: dict[tuple[str, int], Json] = {}
    for row in rows:
        kept = best.setdefault((row["arm"], row["seed"]), row)
        if row["loss"] < kept["loss"]:
            best[row["arm"], row["seed"]] = row
    return [row | {"condition": "", "best_loss": row["loss"]} for row in best.values()]


QUANTITIES = {
    "loss": "best validation loss",
    "mean loss": "mean loss over learning rates",
    "sensitivity": "learning-rate sensitivity",
    "entropy": "entropy at the tuned rate",
    "time": "milliseconds of a step",
}


def by_rate(rows: list[Json]) -> dict[float, list[Finding]]:
    """Each arm against none at every learning rate, uniform attention too; corrected rate by rate."""
    losses: dict[tuple[str, float], dict[int, float]] = {}
    for row in rows:
        losses.setdefault((row["arm"], row["learning_rate"]), {})[row["seed"]] = row["loss"]
    found: dict[float, list[Finding]] = {}
    for (arm, rate), values in losses.items():
        if arm != NONE and (NONE, rate) in losses:
            one = Finding(f"loss at a rate of {rate:g}", arm, paired(values, losses[NONE, rate]))
            found.setdefault(rate, []).append(one)
    return {rate: corrected(found[rate]) for rate in sorted(found)}


def blamed_on_attention(found: dict[float, list[Finding]]) -> list[float]:
    """Rates at which attention fails: QK-norm, which repairs it, is below none, and uniform attention is not."""
    words = {rate: {one.of: one.verdict for one in some} for rate, some in found.items()}
    return [rate for rate, said in words.items() if said.get(CONTROL) == "lower" and said.get(UNIFORM) in NOT_LOWER]


CONTROL, NOT_LOWER = "QK-norm", ("higher", "no difference seen")


def conclude(rows: list[Json]) -> Answer:
    """Each arm against none; corrected over the arms, quantity by quantity."""
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm != UNIFORM]
    numbers = {arm: _by_seed(rows, arm) for arm in arms}
    findings = {
        name: corrected(
            [Finding(what, arm, paired(numbers[arm][name], numbers[NONE][name])) for arm in arms if arm != NONE]
        )
        for name, what in QUANTITIES.items()
    }
    means = {arm: {name: fmean(values.values()) for name, values in numbers[arm].items()} for arm in arms}
    best, steadiest = (min(arms, key=lambda arm: means[arm][name]) for name in ("loss", "mean loss"))
    return Answer(
        f"Each at the best of its rates, {best} has the lowest validation loss ({means[best]['loss']:.3f}; none has "
        f"{means[NONE]['loss']:.3f}); against none: {tally(findings['loss'])}. Over all rates {steadiest} has the "
        f"lowest mean loss ({means[steadiest]['mean loss']:.3f}; none has {means[NONE]['mean loss']:.3f}); against "
        f"none: {tally(findings['mean loss'])} (paired by seed, Holm).",
        _where_it_fails(rates := by_rate(rows)),
        [one for some in (*findings.values(), *rates.values()) for one in some],
    )


def _where_it_fails(found: dict[float, list[Finding]]) -> str:
    blamed = blamed_on_attention(found)
    if not blamed:
        return f"At no rate is {CONTROL} below none and uniform attention not{_both_below(found)}."
    shown = together([f"{rate:g}" for rate in blamed])
    told = tally([one for one in found[blamed[0]] if one.of != UNIFORM])
    return (
        f"At a rate of {shown} attention is what fails: {CONTROL} is below none there and uniform attention is not; "
        f"at {blamed[0]:g}: {told}."
    )


def _both_below(found: dict[float, list[Finding]]) -> str:
    """Say at which rates none loses to both, and what their difference is to those who would repair it."""
    words = {rate: {one.of: one for one in some} for rate, some in found.items()}
    lower = {rate: {arm for arm, one in said.items() if one.verdict == "lower"} for rate, said in words.items()}
    lost = [rate for rate, arms in lower.items() if {CONTROL, UNIFORM} <= arms]
    if not lost:
        return ""
    shown = "; ".join(
        f"at {rate:g} by {-words[rate][CONTROL].estimate.value:.3f} and {-words[rate][UNIFORM].estimate.value:.3f}"
        for rate in lost
    )
    return f"; both are below it {shown}: uniform attention would be better than what none learns there"


STUDY = Study(
    question="Which stabiliser helps most at one budget, in loss and in sensitivity to the learning rate?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=intervals("against none, and its interval"),
    drawn=("best validation loss", "mean loss over learning rates"),
    judged=at_best_rate,
    controls=(UNIFORM,),
    budget=f"30 points of {len(RATES)} runs of {STEPS:,} steps, and 5 runs to tune each arm",
    setting=f"{TRAINED_SCALE}, at each of {len(RATES)} learning rates, AdamW; of five trials each arm has its best "
    "setting, or the best weight decay where it has none (they are not crossed)",
    doubt="A larger model, in which logits have room to grow; more trials for each; overhead where kernels dominate.",
)
