"""Effect of LocAteR on the spectrum during training, compared with weight decay and with a start at that scale."""

from pathlib import Path
from statistics import fmean

from torch import nn

from locater.records import Json
from locater.stabilisers import LocAteR, QKDecay, Stabiliser

from ..rivals import SpectralInitialisation
from ..train.observe import spectra
from .floors import ARMS as FLOORS
from .small import STEPS, TRAINED_SCALE, Attach, arms_by_seed, nothing, result, train_small, trained
from .statistics import Finding, paired, tally, together
from .study import Answer, Figure, Study
from .sweep.folder import Point
from .trained import by_seed, findings

# η/λ at which LocAteR of 1e-2 leaves the heads of this model: a start there says whether starting is enough.
SMALL, XI = 0.12, 0.2


def _locater(strength: float) -> Attach:
    return lambda model: LocAteR(model, strength=strength)


def _decay(decay: float) -> Attach:
    return lambda model, optimizer: QKDecay(model, decay=decay, optimizer=optimizer)


def _start(model: nn.Module) -> Stabiliser:
    return SpectralInitialisation(model, xi=XI, eta=SMALL)


def _both(model: nn.Module) -> Stabiliser:
    _start(model)
    return LocAteR(model, strength=1e-2)


ARMS: dict[str, Attach] = {
    "none": nothing,
    "locater-1e-3": _locater(1e-3),
    "locater-1e-2": _locater(1e-2),
    "locater-1e-1": _locater(1e-1),
    "decay-1": _decay(1.0),
    "decay-5": _decay(5.0),
    "decay-20": _decay(20.0),
    "start": _start,
    "start, then locater-1e-2": _both,
} | FLOORS
COURSE = 100  # steps between two looks at the spectrum


def grid(quick: bool) -> list[Point]:
    arms = ("none", "locater-1e-2", "decay-5", "start", *FLOORS) if quick else ARMS
    return arms_by_seed({"": arms}, quick=quick, short=100)


def measure(point: Point, place: Path) -> Json:
    """η/λ over time beside what the run came to."""
    course: dict[str, float] = {}

    def each(step: int, loss: float, model: nn.Module) -> None:
        if step % COURSE == 0:
            heads = spectra(model, length=model.config.context)  # type: ignore
            course[str(step)] = sum(head["eta"] / head["temperature"] for head in heads) / len(heads)

    arm, steps = point["arm"], point["steps"]
    ran = train_small(trained(point["seed"], steps), ARMS[arm], late=arm.startswith("decay"), each=each)
    return result(ran) | {"course": course}


def conclude(rows: list[Json]) -> Answer:
    parts = {name: findings(rows, name, what) for name, what in QUANTITIES.items()}
    return Answer(
        f"{_scale(rows)} (paired by seed).",
        f"{_directions(rows)}The validation loss, against nothing: {tally(parts['best_loss'])} (Holm).",
        [one for some in parts.values() for one in some],
    )


def _scale(rows: list[Json]) -> str:
    """Compare η/λ at the end; a model that only starts at LocAteR's scale against one that is held there."""
    ends = {name: by_seed(rows, "", name, "eta_over_temperature") for name in ("none", "locater-1e-2", "start")}
    none, held, start = (f"{fmean(some.values()):.2f}" if some else "?" for some in ends.values())
    verdict = Finding("", "", paired(ends["start"], ends["locater-1e-2"])).verdict
    why = {"higher": ": it is the holding and not the start", "no difference seen": ": no difference seen between them"}
    return (
        f"With LocAteR (κ = 1e-2) η/λ ends at {held}, where it ends at {none} with nothing, and at {start} in a model "
        f"that only starts at LocAteR's scale{why.get(verdict, '')}"
    )


def _directions(rows: list[Json]) -> str:
    """Means of how many directions W keeps, as far as they were measured."""
    counts = {name: by_seed(rows, "", name, "directions") for name in ("locater-1e-2", "decay-5", "none")}
    shown = {"none": "nothing"}
    told = [f"{fmean(some.values()):.1f} with {shown.get(name, name)}" for name, some in counts.items() if some]
    return f"Of its directions W keeps {together(told)}. " if told else ""


QUANTITIES = {
    "best_loss": "validation loss",
    "eta_over_temperature": "η/λ",
    "trace_over_temperature": "tr W/λ",
    "directions": "directions of W",
}


def over_time(rows: list[Json]) -> list[Json]:
    return [row | {"step": int(step), "eta": eta} for row in rows for step, eta in row["course"].items()]


STUDY = Study(
    question="What does LocAteR do to the spectrum in training, what does weight decay, and is a small start enough?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("step", "eta", "arm", "", "step", "η/λ"),
    budget=f"55 runs of {STEPS:,} steps",
    setting=TRAINED_SCALE,
    judged=list,
    doubt="Larger models; strengths of decay tuned for the loss.",
    shown=over_time,
)
