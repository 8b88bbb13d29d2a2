"""LocAteR over depth: 1 to 8 layers, with and without a warm-up of the learning rate."""

from ..records import Json
from .mechanism import QUICK
from .study import Figure, Study
from .sweep.folder import Point
from .trained import measure, points, sentences

ARMS = {"none": {}, "locater": {"strength": 1e-2}}


def grid(quick: bool) -> list[Point]:
    full: Json = dict(data="embedded", tokenizer="bpe", bpe_size=4096, steps=2000, d_feedforward=512)
    common = QUICK | {"steps": 60} if quick else full
    warm = common.get("warmup", 200)
    conditions = {
        f"{depth} layers, {'warm-up' if warmup else 'no warm-up'}": {"num_layers": depth, "warmup": warmup}
        for depth in ((1, 2) if quick else (1, 2, 4, 8))
        for warmup in (warm, 0)
    }
    return points(ARMS, seeds=range(3), preset="small", common=common | {"num_heads": 4}, conditions=conditions)


def conclude(rows: list[Json]) -> list[str]:
    return [*sentences(rows, "best_loss", "best validation loss"), *sentences(rows, "entropy", "entropy")]


STUDY = Study(
    question="Does what one layer shows carry over to 2, 4 and 8, and does LocAteR replace warm-up?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("condition", "best_loss", "arm", "", "", "best validation loss"),
    budget="48 runs of 2,000 steps: about 4 hours of one core (quick: two minutes)",
    doubt="Longer runs; other strengths at each depth; ρ by layer against measured gradients was not looked at.",
)
