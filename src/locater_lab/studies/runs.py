"""Runs of `locater train` side by side: arms over seeds at one step, differences paired by seed; knows no torch."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import StatisticsError, fmean, stdev
from typing import NamedTuple

from locater.errors import Refusal, missing, refusal
from locater.records import Json, read_json

from ..train.metrics import METRICS, Row, read_metrics
from .sweep.folder import LIST, RUNS

CONFIG = "config.json"


class RunQuantity(NamedTuple):
    """The heading of a number, and how a row of validation gives it; KeyError where it does not."""

    heading: str
    read: Callable[[Row], float]
    places: int = 2


def _over_heads(read: Callable[[Row], float]) -> Callable[[Row], float]:
    """The mean over all heads, or none: without the head that exploded it would mean something else."""
    return lambda row: fmean([read(head) for head in row["heads"]])


# The most telling first: a narrow terminal shows the first of them.
QUANTITIES = {
    "perplexity": RunQuantity("perplexity", lambda row: row["perplexity"]),
    "loss": RunQuantity("loss", lambda row: row["loss"]),
    "entropy": RunQuantity("entropy", lambda row: row["entropy"], 3),
    "trace_over_temperature": RunQuantity("tr W/λ", _over_heads(lambda head: head["trace"] / head["temperature"])),
    "eta_over_temperature": RunQuantity("η/λ", _over_heads(lambda head: head["eta"] / head["temperature"])),
    "xi": RunQuantity("ξ", _over_heads(lambda head: head["xi"])),
    "localisation": RunQuantity("local", _over_heads(lambda head: head["localisation"])),
    "effective_rank": RunQuantity("rank", lambda row: row["layers"][-1]["effective_rank"], 1),
    "residual": RunQuantity("residual", lambda row: row["layers"][-1]["residual"]),
    "near_mass": RunQuantity("near", _over_heads(lambda head: head["near_mass"])),
    "trace_of_square_over_temperature_squared": RunQuantity(
        "tr W²/λ²", _over_heads(lambda head: head["trace_of_square"] / head["temperature"] ** 2)
    ),
}
# What arms are ordered by: the first of these that any has.
SCORES = ("perplexity", "loss")
STRETCHES = 32  # of a training curve: more are noise
Place = tuple[int, int]  # of a head: its layer, its number


@dataclass(frozen=True)
class Run:
    """One folder: its arm, the seed that pairs it with other arms, and its numbers by step."""

    name: str
    arm: str
    seed: int
    validations: dict[int, dict[str, float]]
    training: dict[int, float]  # the loss between two logged steps, by the second
    entropies: dict[int, dict[Place, float]] = field(default_factory=dict)  # of each head's attention, 1 for even


def compare_runs(
    folder: Path,
    *,
    step: int | None = None,
    arms: Collection[str] | None = None,
    seeds: Collection[int] | None = None,
    against: str | None = None,
) -> Json:
    """The document of all arms, or of some, at one step, by default the last that every run with a validation has."""
    return compare_all(read_runs(folder), folder=str(folder), step=step, arms=arms, seeds=seeds, against=against)


def compare_all(
    runs: Sequence[Run],
    *,
    folder: str,
    step: int | None = None,
    arms: Collection[str] | None = None,
    seeds: Collection[int] | None = None,
    against: str | None = None,
) -> Json:
    """The same of runs that are read already."""
    runs = _chosen(runs, arms, seeds)
    at = _common_step(runs) if step is None else _known_step(runs, step)
    kept = [run for run in runs if at in run.validations]
    found = {arm: list(group) for arm, group in groupby(kept, key=lambda run: run.arm)}
    if against is not None and against not in found:
        raise refusal(f"--against with an arm that has step {at}: {_some(found)}", repr(against))
    present = {name for run in kept for name in run.validations[at]}
    score = next((name for name in SCORES if name in present), SCORES[-1])
    rows = [_arm(group, at, None if against in (None, arm) else found[against]) for arm, group in found.items()]
    return {
        "schema": "locater.runs/1",
        "folder": folder,
        "step": at,
        "score": score,
        "against": against,
        "arms": sorted(rows, key=lambda row: row["quantities"].get(score, {"mean": math.inf})["mean"]),
        "left_out": [
            {"run": run.name, "last_step": max(run.validations, default=None)}
            for run in runs
            if at not in run.validations
        ],
    }


def read_runs(folder: Path) -> list[Run]:
    """All runs directly in a folder, or in that of a sweep, by arm and seed."""
    folder = folder / RUNS if (folder / LIST).is_file() else folder
    try:
        found = sorted(path for path in folder.iterdir() if (path / METRICS).is_file())
    except OSError as reason:
        raise refusal("a folder with runs of locater train", f"{folder} ({reason.strerror})") from None
    if not found:
        remedy = "give the folder above it" if (folder / METRICS).exists() else "make some with locater train --out"
        raise refusal(f"a folder with runs of locater train in folders with {METRICS}", folder, remedy)
    runs = sorted((read_run(path) for path in found), key=lambda run: (run.arm, run.seed))
    for _, group in groupby(runs, key=lambda run: run.arm):
        _check_arm(list(group))
    return runs


def _chosen(runs: Sequence[Run], arms: Collection[str] | None, seeds: Collection[int] | None) -> list[Run]:
    """Select runs of some arms and seeds; an arm that is missing is a mistake, a seed that some arm lacks is not."""
    there = dict.fromkeys(run.arm for run in runs)
    if unknown := [arm for arm in arms or () if arm not in there]:
        raise refusal(f"--arms among {_some(there)}", _some(unknown))
    found = [run for run in runs if (arms is None or run.arm in arms) and (seeds is None or run.seed in seeds)]
    if not found:
        raise refusal(f"--seeds with one of {_some(sorted({run.seed for run in runs}))}", _some(seeds or ()))
    return found


def read_run(folder: Path) -> Run:
    """The run in one folder."""
    path = folder / METRICS
    try:
        rows = read_metrics(path)
        validations = {_step(row): _numbers(row) for row in rows if row["kind"] == "validation"}
        training = {_step(row): float(row["loss"]) for row in rows if row["kind"] == "train"}
        entropies = {_step(row): _of_heads(row) for row in rows if row["kind"] == "validation"}
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as reason:
        got = str(reason) if isinstance(reason, Refusal) else f"{type(reason).__name__} ({reason!s:.80})"
        raise refusal(f"metrics of locater train in {path}", got, "move the folder elsewhere") from None
    named = re.fullmatch(r"(.+)-seed(\d+)", folder.name)
    arm, seed = (named[1], int(named[2])) if named else (folder.name, _seed(folder / CONFIG))
    return Run(folder.name, arm, seed, validations, training, entropies)


def _step(row: Row) -> int:
    if type(row["step"]) is not int:
        raise TypeError(f"step {row['step']!r}")
    return row["step"]


def _numbers(row: Row) -> dict[str, float]:
    """The quantities that a row has, as far as they are finite."""
    found = {}
    for name, quantity in QUANTITIES.items():
        try:
            value = quantity.read(row)
        except (KeyError, IndexError, StatisticsError, ZeroDivisionError):
            continue
        if math.isfinite(value):
            found[name] = value
    return found


def _of_heads(row: Row) -> dict[Place, float]:
    """The entropy of each head that says where it is and has a finite one."""
    found = {}
    for head in row.get("heads", ()):
        layer, number, value = (head.get(name) for name in ("layer", "head", "normalised_entropy"))
        if type(layer) is type(number) is int and type(value) in (int, float) and math.isfinite(value):
            found[layer, number] = value
    return found


def _seed(path: Path) -> int:
    try:
        return int(read_json(path)["loop"]["seed"])
    except (ArithmeticError, ValueError, TypeError, LookupError) as reason:
        got = str(reason) if isinstance(reason, Refusal) else f"{type(reason).__name__} ({reason!s:.80})"
        raise refusal(f"a seed of locater train in {path}", got, "name the folder ARM-seedN") from None


def _check_arm(runs: Sequence[Run]) -> None:
    """A folder named without a seed is an arm by itself; else a seed has one run."""
    names = _some(run.name for run in runs)
    if len({run.seed for run in runs}) < len(runs) or len(runs) > 1 and any(run.name == run.arm for run in runs):
        raise refusal(f"one run for each seed of the arm {runs[0].arm}", names, "rename a folder")


def _common_step(runs: Sequence[Run]) -> int:
    validated = [set(run.validations) for run in runs if run.validations]
    if not validated:
        raise refusal("a run with a validation", f"{len(runs)} without", "wait for the first one")
    common = set.intersection(*validated)
    if not common:
        raise missing("a step that every run was validated at", f"choose one by --step: {_steps(runs)}")
    return max(common)


def _known_step(runs: Sequence[Run], step: int) -> int:
    if not any(step in run.validations for run in runs):
        raise refusal(f"--step with one that a run was validated at: {_steps(runs)}", step)
    return step


def _steps(runs: Sequence[Run]) -> str:
    return _some(sorted({step for run in runs for step in run.validations})) or "there is none yet"


def _some(things: Iterable[object], most: int = 16) -> str:
    """The names of all, or of the first and the last ones."""
    names = list(map(str, things))
    return ", ".join(names if len(names) <= most else [*names[: most // 2], "…", *names[-most // 2 :]])


def _arm(runs: Sequence[Run], step: int, other: Sequence[Run] | None) -> Json:
    """One arm: its means, its differences to another if there is one, and its course over the steps."""
    found: Json = {"arm": runs[0].arm, "seeds": [run.seed for run in runs]}
    found["quantities"] = _each(lambda name: _at(runs, step, name))
    if other is not None:
        found["differences"] = _each(lambda name: _difference(_at(runs, step, name), _at(other, step, name)))
    found["curves"] = {name: curve for name in QUANTITIES if (curve := _curve(runs, name))["step"]}
    if len(heads := _heads(runs, step)) > 1:
        found["heads"] = heads
    found["training"] = {"loss": _training(runs, None)}
    if other is not None:
        found["training"]["difference"] = _training(runs, other)
    return found


def _heads(runs: Sequence[Run], step: int) -> list[Json]:
    """Each head's entropy at the step, its mean over seeds; a head that a seed lacks is left out, as in a curve."""
    seeds = [run.entropies.get(step, {}) for run in runs]
    shared = sorted(set.intersection(*map(set, seeds)))
    return [{"layer": p[0], "head": p[1], "normalised_entropy": fmean(seed[p] for seed in seeds)} for p in shared]


def _each(values: Callable[[str], Mapping[int, float]]) -> Json:
    return {name: estimate(of_seed) for name in QUANTITIES if (of_seed := values(name))}


def _at(runs: Sequence[Run], step: int, name: str) -> dict[int, float]:
    """The values of one quantity by seed."""
    rows = {run.seed: run.validations.get(step, {}) for run in runs}
    return {seed: row[name] for seed, row in rows.items() if name in row}


def _difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[int, float]:
    return {seed: value - theirs[seed] for seed, value in ours.items() if seed in theirs}


def _curve(runs: Sequence[Run], name: str) -> dict[str, list]:
    """Only steps that all seeds have: elsewhere the mean would jump because another seed is in it."""
    values = {step: _at(runs, step, name) for step in sorted(runs[0].validations)}
    return _course({step: of_seed for step, of_seed in values.items() if len(of_seed) == len(runs)})


def _training(runs: Sequence[Run], other: Sequence[Run] | None) -> dict[str, list]:
    """The training loss in stretches of steps, or its difference to another arm's.

    Batches are drawn by the seed, so the difference is one on the same texts, far quieter than either loss.
    """
    steps = sorted(set.intersection(*(set(run.training) for run in [*runs, *(other or [])])))
    count = min(STRETCHES, len(steps))
    found: dict[int, dict[int, float]] = {}
    for number in range(count):  # as alike in length as can be: a short last one would be noise
        stretch = steps[len(steps) * number // count : len(steps) * (number + 1) // count]
        ours, theirs = (
            {run.seed: fmean(run.training[step] for step in stretch) for run in group} for group in (runs, other or [])
        )
        found[stretch[-1]] = ours if other is None else _difference(ours, theirs)
    return _course({step: of_seed for step, of_seed in found.items() if of_seed})


def _course(values: Mapping[int, Mapping[int, float]]) -> dict[str, list]:
    """Means over seeds, step by step."""
    points = {step: estimate(of_seed) for step, of_seed in values.items()}
    columns = {part: [point[part] for point in points.values()] for part in ("mean", "standard_error")}
    return {"step": list(points)} | columns


def estimate(values: Mapping[int, float]) -> Json:
    """Mean and standard error over seeds, s/√n with the n − 1 of a sample; a single seed has no error.

    >>> estimate({0: 1.0, 1: 3.0})
    {'mean': 2.0, 'standard_error': 1.0, 'seeds': [0, 1], 'values': [1.0, 3.0]}
    """
    numbers = list(values.values())
    error = stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return {"mean": fmean(numbers), "standard_error": error, "seeds": list(values), "values": numbers}
