"""Intervene on localisation itself: the mean of the spectrum held at several places, at one strength of shrinking."""

from ..records import Json
from .mechanism import QUICK
from .statistics import Estimate, compared, correlated, paired, spearman
from .study import Figure, Study
from .sweep.folder import Point
from .trained import by_seed, measure, points, sentences

SHRUNK = {"strength": 1e-2}
# tr W in units of λ; the scale is at least |tr W|/√d_h, so the far ones have a larger η at the same strength.
ARMS: dict[str, Json] = {
    "none": {},
    "free": SHRUNK,
    "mean 0": SHRUNK | {"mean": "0"},
    "mean 0.5": SHRUNK | {"mean": "0.5"},
    "mean 1": SHRUNK | {"mean": "1"},
    "mean 2": SHRUNK | {"mean": "2"},
    "mean 3.5": SHRUNK | {"mean": "3.5"},
    "mean -1": SHRUNK | {"mean": "-1"},
}


def grid(quick: bool) -> list[Point]:
    full: Json = dict(data="embedded", tokenizer="bpe", bpe_size=4096, steps=2000)
    common = QUICK | {"mean_warmup": 20} if quick else full
    return points(ARMS, seeds=range(3), preset="paper", common=common, conditions={"": {}})


def conclude(rows: list[Json]) -> list[str]:
    """Whether the loss follows localisation among arms that differ in it: by rank, for each seed, against 0."""
    held = [row for row in rows if row["arm"].startswith("mean") and "localisation" in row]
    said = sentences(rows, "best_loss", "best validation loss", against="free")
    by = {seed: _follows([row for row in held if row["seed"] == seed]) for seed in {row["seed"] for row in held}}
    known = {seed: one.value for seed, one in by.items() if one.value == one.value}
    if known:
        mean = paired(known, dict.fromkeys(known, 0.0))
        said.append(compared("held means", "no relation", "Spearman of loss with localisation", mean))
    if held:
        traces = {arm: by_seed(rows, "", arm, "localisation") for arm in dict.fromkeys(row["arm"] for row in held)}
        lowest, highest = (pick(min(values.values()) for values in traces.values()) for pick in (min, max))
        said.append(f"Localisation was moved from {lowest:.2f} to {highest:.2f} by holding the mean.")
        said.append(correlated("localisation", "entropy", _entropy(held)))
    return said


def _follows(rows: list[Json]) -> Estimate:
    return spearman([row["localisation"] for row in rows], [row["best_loss"] for row in rows])


def _entropy(rows: list[Json]) -> Estimate:
    some = [row for row in rows if "entropy" in row]
    return spearman([row["localisation"] for row in some], [row["entropy"] for row in some])


STUDY = Study(
    question="If localisation is set from outside, does the loss follow it, or does it only accompany a small scale?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("localisation", "best_loss", "arm", "", "localisation", "best validation loss"),
    budget="24 runs of 2,000 steps: about an hour of one core (quick: two minutes)",
    doubt="Forced windows and temperatures, which were not tried; longer runs, in which a held mean loses its lead.",
)
