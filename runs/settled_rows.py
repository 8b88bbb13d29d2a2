"""The kept rows of runs/settle.py: runs at their schedule's end, what each ended with, and ratios paired by seed."""

import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from locater_lab.studies.runs import Run, read_runs
from locater_lab.studies.statistics import FEWEST, MeanEstimate, holm, paired
from locater_lab.train.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parent))
from settle import LENGTHS, WORD_RATES  # noqa: E402
from settled_said import ARMS, EARLY, NOT_SURE, TUNED, TUNED_SHORTER, UNTUNED, Outcome, Ratio  # noqa: E402

KEPT = Path(__file__).parent / "measured" / "settle"
STAGES = ("tune", "rates", "A", "A-20000", "B-rates", "B-tuned", "B")
LOCATERS = ("held", "released")
SEEDS = {"A": 5, "A-20000": 3, "B": 3}
JUDGED = {"A": ("none", *ARMS), "A-20000": ("none", "held"), "B": ("none", "held")}
ENDS = {
    "A": int(LENGTHS["A"]),
    "A-20000": 20_000,
    "B": 4079,
}  # four epochs of the words, whose last batch ends one step before the cosine
LEVELS = (0.3, 0.8)  # of the run: the losses of `none` there are the ones that the others' steps are counted to

Arms = dict[str, dict[int, Run]]  # by arm and seed


def read(stage: str, kept: Path = KEPT) -> Arms:
    """The judged runs of a stage that are at their schedule's end; of an arm that was judged anew, those."""
    found: Arms = {}
    for _, arms in _parts(stage, kept):
        found |= arms
    return {arm: found[arm] for arm in ("none", *ARMS) if arm in found}


def _parts(stage: str, kept: Path) -> Iterator[tuple[str, Arms]]:
    """By folder. Runs at a rate that was tuned later take the place of others once they are enough for a claim."""
    for part in (stage, f"{stage}-tuned"):
        ended: Arms = {}
        for run in read_runs(kept / part) if any((kept / part).glob("*/metrics.jsonl")) else []:
            if ENDS[stage] in run.validations:
                ended.setdefault(run.arm, {})[run.seed] = run
        yield part, {arm: runs for arm, runs in ended.items() if part == stage or len(runs) >= FEWEST}


def begun_runs(stage: str, kept: Path = KEPT) -> dict[str, int]:
    """By name, the last step in the rows of runs that are not at their schedule's end."""
    ended = {f"{arm}-seed{seed}" for arm, runs in read(stage, kept).items() for seed in runs}
    paths = sorted((kept / stage).glob("*/metrics.jsonl"))
    found = {path.parent.name: read_metrics(path) for path in paths if path.parent.name not in ended}
    return {name: rows[-1]["step"] for name, rows in found.items() if rows}


def rates(stage: str, kept: Path = KEPT) -> dict[str, float]:
    """By arm, the highest rate of its judged runs."""
    found: dict[str, float] = {}
    for part, arms in _parts(stage, kept):
        for arm, runs in arms.items():
            rows = [row for run in runs.values() for row in read_metrics(kept / part / run.name / "metrics.jsonl")]
            found[arm] = max((row["learning_rate"] for row in rows if "learning_rate" in row), default=math.nan)
    return found


def tried(part: str, kept: Path = KEPT) -> dict[str, dict[str, float]]:
    """By arm and rate, as its folder has it, the loss at the end on the tuning seed, with the best strength."""
    end, found = {"tune": 2000, "rates": ENDS["A"], "B-rates": ENDS["B"]}[part], {}
    for path in sorted((kept / part).glob("*/metrics.jsonl")):
        arm, rate, *_ = path.parent.name.split("-")
        losses = {row["step"]: row["loss"] for row in read_metrics(path) if row["kind"] == "validation"}
        if end in losses:
            of_arm = found.setdefault(arm, {})
            of_arm[rate] = min(losses[end], of_arm.get(rate, math.inf))
    return {arm: found[arm] for arm in ("none", *ARMS) if arm in found}


def how_tuned(stage: str, kept: Path = KEPT) -> str:
    """Tell whether the rates of a stage were tuned; B's, once every arm has all rates and is judged at its best."""
    if stage != "B":
        return TUNED if stage == "A" else TUNED_SHORTER
    judged, losses = rates("B", kept), tried("B-rates", kept)
    return TUNED if judged and all(_at_best(rate, losses.get(arm, {})) for arm, rate in judged.items()) else UNTUNED


def _at_best(rate: float, losses: Mapping[str, float]) -> bool:
    is_whole = {f"{one:g}" for one in WORD_RATES} <= losses.keys()
    return is_whole and math.isclose(rate, float(min(losses, key=losses.__getitem__)), rel_tol=0.02)


def last_loss(run: Run) -> float:
    return run.validations[max(run.validations)]["loss"]


def best_loss(run: Run) -> float:
    return min(row["loss"] for row in run.validations.values())


def at_end(run: Run, name: str) -> float:
    return run.validations[max(run.validations)][name]


def steps_to(run: Run, level: float) -> float:
    """Step at which the validation loss first reaches a level, between two validations by a line; NaN if never."""
    before: tuple[int, float] | None = None
    for step, row in sorted(run.validations.items()):
        if row["loss"] <= level:
            if before is None or before[1] <= level:
                return float(step)
            share = (before[1] - level) / (before[1] - row["loss"])
            return before[0] + share * (step - before[0])
        before = step, row["loss"]
    return math.nan


def against_none(arms: Arms, arm: str, quantity: Callable[[Run], float]) -> MeanEstimate:
    """Paired difference to `none`, seed by seed; seeds without a number are left out."""
    return paired(_finite(arms.get(arm, {}), quantity), _finite(arms.get("none", {}), quantity))


def _finite(runs: Mapping[int, Run], quantity: Callable[[Run], float]) -> dict[int, float]:
    return {seed: one for seed, run in runs.items() if math.isfinite(one := quantity(run))}


def end_ratio(arms: Arms, arm: str) -> Ratio:
    return Ratio(against_none(arms, arm, last_loss))


def best_ratio(arms: Arms, arm: str) -> Ratio:
    return Ratio(against_none(arms, arm, best_loss))


def steps_ratio(arms: Arms, arm: str, level: float) -> Ratio:
    return Ratio(against_none(arms, arm, lambda run: math.log(steps_to(run, level))))


def longer_ratio(short: Arms, long: Arms, arm: str) -> Ratio:
    """What the longer schedule makes of an arm's perplexity, paired by seed."""
    return Ratio(paired(_finite(long.get(arm, {}), last_loss), _finite(short.get(arm, {}), last_loss)))


def moved(short: Arms, long: Arms, arm: str) -> Ratio:
    """The ratio to `none` with the longer schedule over that with the shorter, on the seeds that have all four runs."""
    return Ratio(paired(gains(long, arm), gains(short, arm)))


def of_seeds(arms: Arms, seeds: Collection[int]) -> Arms:
    return {arm: {seed: run for seed, run in runs.items() if seed in seeds} for arm, runs in arms.items()}


def gains(arms: Arms, arm: str) -> dict[int, float]:
    """By seed, the loss at the end less that of `none`."""
    none = arms.get("none", {})
    return {seed: last_loss(run) - last_loss(none[seed]) for seed, run in arms.get(arm, {}).items() if seed in none}


def levels(arms: Arms) -> list[tuple[int, float]]:
    """Steps near the chosen shares of the run, and the mean loss that `none` has there."""
    runs = list(arms.get("none", {}).values())
    if not runs:
        return []
    steps = sorted(set.intersection(*(set(run.validations) for run in runs)))
    chosen = [min(steps, key=lambda step: abs(step - share * steps[-1])) for share in LEVELS]
    return [(step, fmean(run.validations[step]["loss"] for run in runs)) for step in chosen]


def outcome(arms: Arms, how: str = TUNED) -> Outcome:
    """Judge the forms of LocAteR that have three seeds, with Holm's correction over them."""
    ends = _together({arm: end_ratio(arms, arm) for arm in LOCATERS if arm in arms})
    if not ends:
        return Outcome()
    early = _together({arm: steps_ratio(arms, arm, levels(arms)[0][1]) for arm in ends})
    leads, led = (any(one.word == "lower" for one in some.values()) for some in (ends, early))
    is_sure = all(one.said != "a lead is not sure" for one in ends.values())
    word = "Yes" if leads else "No" if not led else EARLY if is_sure else NOT_SURE
    return Outcome(word, ends, early, how)


def _together(ratios: Mapping[str, Ratio]) -> dict[str, Ratio]:
    """Those that are claimed, judged as several."""
    known = {arm: ratio.estimate for arm, ratio in ratios.items() if ratio.is_claimed}
    return {arm: Ratio(one) for arm, one in holm(known).items()}


def outcomes(kept: Path = KEPT) -> dict[str, Outcome]:
    """By its name in what the README says, the outcome of each stage."""
    stages = {"end": "A", "longer": "A-20000", "words": "B"}
    return {name: outcome(read(stage, kept), how_tuned(stage, kept)) for name, stage in stages.items()}
