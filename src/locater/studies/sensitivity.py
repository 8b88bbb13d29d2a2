"""LocAteR's gain over width, heads, learning rate, positions, norm placement and batch, one at a time."""

from ..records import Json
from .mechanism import QUICK
from .study import Figure, Study
from .sweep.folder import Point
from .trained import measure, points, sentences

ARMS = {"none": {}, "locater": {"strength": 1e-2}}
FACTORS: dict[str, Json] = {
    "as it is": {},
    "half the width": {"d_model": 64, "d_feedforward": 64},
    "four heads": {"num_heads": 4},
    "learning rate × 4": {"learning_rate": 4e-3},
    "learning rate / 4": {"learning_rate": 2.5e-4},
    "rotary": {"positions": "rotary"},
    "pre-LN": {"norm_first": True},
    "batch × 2": {"batch": 32},
}


def grid(quick: bool) -> list[Point]:
    full: Json = dict(data="embedded", tokenizer="bpe", bpe_size=4096, steps=2000)
    chosen = ("as it is", "learning rate × 4", "pre-LN") if quick else tuple(FACTORS)
    conditions = {name: FACTORS[name] for name in chosen}
    common = QUICK | {"steps": 60} if quick else full
    return points(ARMS, seeds=range(3), preset="paper", common=common, conditions=conditions)


def conclude(rows: list[Json]) -> list[str]:
    return sentences(rows, "best_loss", "best validation loss")


STUDY = Study(
    question="Does LocAteR's gain depend on width, heads, learning rate, positions, norm placement or batch?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("condition", "best_loss", "arm", "", "", "best validation loss"),
    budget="48 runs of 2,000 steps: about 3 hours of one core (quick: two minutes)",
    doubt="A strength tuned for every factor; factors in combination.",
)
