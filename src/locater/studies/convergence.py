"""The paper's model to the end: validation every 500 steps until none has improved for 3,000."""

from ..records import Json
from ..training.data.text import WIKITEXT
from .mechanism import QUICK
from .statistics import FEWEST
from .study import Figure, Study
from .sweep.folder import Point
from .trained import at_common_step, measure, points, ratio, sentences

ARMS = {
    "none": {},
    "locater-1e-2": {"strength": 1e-2},
    "locater-2.5e-3": {"strength": 2.5e-3},
    "decay-2": {"qk_decay": 2.0},
    "decay-8": {"qk_decay": 8.0},
}
# What the question asks for: the perplexity of LocAteR over that of no regulariser.
WANTED = 0.95


def grid(quick: bool) -> list[Point]:
    full: Json = dict(data=WIKITEXT, tokenizer="bpe", bpe_size=4096, steps=60_000, patience=3000)
    common = QUICK | {"steps": 400, "patience": 120, "learning_rate": 1e-2} if quick else full
    arms = {name: ARMS[name] for name in ("none", "locater-1e-2")} if quick else ARMS
    conditions = {"": {}} if quick else {"": {}, "dropout 0.1": {"dropout": 0.1}}
    return points(arms, seeds=range(3), preset="paper", common=common, conditions=conditions)


def conclude(rows: list[Json]) -> list[str]:
    said = []
    if not all(row.get("is_done", True) for row in rows):
        step, rows = at_common_step(rows)
        said = [f"Open: not all runs have ended; what follows is at step {step:,}, the last that all have reached."]
    said += sentences(rows, "best_loss", "best validation loss")
    for arm in dict.fromkeys(row["arm"] for row in rows if row["arm"].startswith("locater")):
        found = ratio(rows, arm)
        if found.count < FEWEST:
            said.append(f"{arm} is at {found.value:.3f} times the perplexity of none on {found.count} seeds: open.")
            continue
        verdict = "yes" if found.high <= WANTED else "no" if found.low > WANTED else "not settled"
        interval = f"[{found.low:.3f}, {found.high:.3f}]"
        said.append(
            f"{arm} is at {found.value:.3f} {interval} times the perplexity of none ({found.count} seeds, paired, "
            f"95 %). At most {WANTED}: {verdict}."
        )
    return said


STUDY = Study(
    question="Trained until nothing improves, does LocAteR end at 0.95 times the perplexity or less?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure("best_step", "best_loss", "arm", "condition", "step of the best validation", "its loss"),
    budget="30 runs of some 20,000 steps: about 12 hours of one core (quick: two minutes)",
    doubt="QK-norm, tuned alike, and word level; both are left out here.",
)
