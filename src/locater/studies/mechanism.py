"""What LocAteR does to the spectrum while a model trains, beside weight decay of queries and keys."""

from ..records import Json
from .study import Figure, Study
from .sweep.folder import Point
from .trained import measure, points, sentences

ARMS = {
    "none": {},
    "locater-1e-3": {"strength": 1e-3},
    "locater-1e-2": {"strength": 1e-2},
    "decay-2": {"qk_decay": 2.0},
    "decay-8": {"qk_decay": 8.0},
}
QUICK = dict(data="embedded", tokenizer="bpe", bpe_size=512, context=32, d_model=32, d_feedforward=32)
QUICK |= dict(steps=120, warmup=20, batch=8, validate_every=60, validation_windows=64, save_every=60)


def grid(quick: bool) -> list[Point]:
    full: Json = dict(data="embedded", tokenizer="bpe", bpe_size=4096, steps=2000)
    return points(ARMS, seeds=range(3), preset="paper", common=QUICK if quick else full, conditions={"": {}})


def conclude(rows: list[Json]) -> list[str]:
    return [
        *sentences(rows, "eta_over_temperature", "η/λ"),
        *sentences(rows, "trace_over_temperature", "tr W/λ"),
        *sentences(rows, "directions", "directions of W"),
        *sentences(rows, "best_loss", "best validation loss"),
    ]


STUDY = Study(
    question="What does LocAteR do to the spectrum in training, and what does weight decay do instead?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("eta_over_temperature", "directions", "arm", "", "η/λ", "directions of W"),
    budget="15 runs of 2,000 steps: some 45 minutes of one core (quick: two minutes)",
    doubt="Other strengths of decay; a scale reached by initialisation alone was not tried.",
)
