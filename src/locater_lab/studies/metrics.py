"""Beyond perplexity: calibration, loss by place and by frequency, copying, rank, gradient noise, over localisation."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.attention import rank
from locater.records import Json
from locater.stabilisers import LocAteR

from .floors import ARMS as FLOORS
from .interventions import with_repeats
from .localisation_helps import ARMS as SET
from .localisation_helps import follows
from .small import STEPS, Attach, Ran, arms_by_seed, nothing, result, train_small, trained, trained_scale
from .statistics import Finding, corrected, tally
from .study import Answer, Study, intervals
from .sweep.folder import Point
from .trained import findings

BINS = 10
NUM_TEXTS, NUM_BATCHES = 128, 16
CHOSEN = ("window 2", "window 8", "temperature 3", "ξ 2 at η 0.3")
ARMS: dict[str, Attach] = {"none": nothing, "LocAteR": lambda model: LocAteR(model, strength=1e-2)}
ARMS |= {name: SET[name] for name in CHOSEN} | FLOORS
NUM_STEPS = 4 * STEPS  # half of the texts say nothing of language: `none` passes the bigram table after some 3,000
NUM_LAYERS = 2  # the least that can copy by what stood before (induction)


def grid(quick: bool) -> list[Point]:
    return arms_by_seed({"": ARMS}, quick=quick, short=60, steps=NUM_STEPS)


def measure(point: Point, place: Path) -> Json:
    config = trained(point["seed"], point["steps"], num_layers=NUM_LAYERS)
    ran = train_small(config, ARMS[point["arm"]], task=with_repeats)
    return result(ran) | numbers(ran)


def numbers(ran: Ran) -> Json:
    """All metrics of one model."""
    tokens, targets = ran.data.batches.validation(0, NUM_TEXTS)
    with torch.no_grad():
        hidden = ran.model.hidden(tokens)
        logits = ran.model.output(hidden)
    losses = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none")
    rare, frequent = by_frequency(losses, targets, _counts(ran))
    quarter = losses.shape[1] // 4
    found = {
        "calibration_error": calibration_error(logits, targets),
        "early_loss": float(losses[:, :quarter].mean()),
        "late_loss": float(losses[:, -quarter:].mean()),
        "rare_loss": rare,
        "frequent_loss": frequent,
        "copying": copying(ran),
        "effective_rank": float(rank(hidden).effective_rank.mean()),
        "gradient_noise": gradient_noise(list(gradients(ran))),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def calibration_error(logits: Float[Tensor, "*batch words"], targets: Int[Tensor, "*batch"]) -> float:
    """Σ over bins of confidence of (share of tokens) · |accuracy − mean confidence| (Guo et al. 2017)."""
    confidence, word = logits.softmax(-1).flatten(0, -2).max(-1)
    right = (word == targets.flatten()).float()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = [(right[bins == one] - confidence[bins == one]).sum().abs() for one in range(BINS)]
    return float(sum(gaps) / len(right))


def _counts(ran: Ran) -> Int[Tensor, " words"]:
    """Count each token in the training text."""
    assert ran.data.tokens is not None
    return torch.bincount(
        torch.from_numpy(ran.data.tokens.train.astype("int64")), minlength=ran.model.config.vocab_size
    )


def by_frequency(
    losses: Float[Tensor, "texts tokens"], targets: Int[Tensor, "texts tokens"], counted: Int[Tensor, " words"]
) -> tuple[float, float]:
    """The loss of the rarest third of the tokens that are to be predicted, and of the most frequent third."""
    order = counted[targets.flatten()].argsort(stable=True)
    third = len(order) // 3
    return float(losses.flatten()[order[:third]].mean()), float(losses.flatten()[order[-third:]].mean())


@torch.no_grad()
def copying(ran: Ran) -> float:
    """By how many nats random tokens are foretold better when they come a second time (after Olsson et al. 2022)."""
    half = ran.model.config.context // 2
    some = torch.randint(ran.model.config.vocab_size, (NUM_TEXTS, half), generator=torch.Generator().manual_seed(0))
    texts = torch.cat([some, some], 1)
    losses = torch.nn.functional.cross_entropy(ran.model(texts)[:, :-1].mT, texts[:, 1:], reduction="none")
    # The first token of the second half is where the first one ends: nothing says that a copy begins.
    return float(losses[:, : half - 1].mean() - losses[:, half:].mean())


def gradients(ran: Ran) -> Iterator[Float[Tensor, " weights"]]:
    """Yield gradients of batches of training text, one after the other."""
    for number in range(NUM_BATCHES):
        tokens, targets = ran.data.batches.training(number * 8, 8)
        loss = torch.nn.functional.cross_entropy(ran.model(tokens).flatten(0, 1), targets.flatten())
        parts = torch.autograd.grad(loss, [one for one in ran.model.parameters() if one.requires_grad])
        yield torch.cat([part.flatten() for part in parts])


def gradient_noise(found: list[Float[Tensor, " weights"]]) -> float:
    """log₁₀ of tr Σ/|G|², Σ the covariance of batches' gradients, unbiased |G|² (McCandlish et al. 2018)."""
    stacked = torch.stack(found).double()
    mean = stacked.mean(0)
    spread = float((stacked - mean).square().sum() / (len(found) - 1))
    signal = float(mean.square().sum()) - spread / len(found)
    return math.log10(spread / signal) if signal > 0 else math.nan


METRICS = {
    "best_loss": "loss",
    "calibration_error": "calibration error",
    "early_loss": "loss at the first quarter of a text",
    "late_loss": "loss at the last quarter",
    "rare_loss": "loss of rare tokens",
    "frequent_loss": "loss of frequent tokens",
    "copying": "copying",
    "effective_rank": "effective rank",
    "gradient_noise": "gradient noise",
}


def conclude(rows: list[Json]) -> Answer:
    relations = corrected(
        [
            Finding("over the mass on the last 4 tokens", what, follows(rows, "near_mass", name), "relation")
            for name, what in METRICS.items()
        ]
    )
    told = {arm: _against_none(rows, arm) for arm in AGAINST_NONE}
    words = "; ".join(f"with {arm}, {tally(some)}" for arm, some in told.items())
    return Answer(
        f"Over {len({row['arm'] for row in rows})} arms that differ in where attention looks, each measure over the "
        f"mass on the last 4 tokens: {tally(relations)} (rank correlations over arms, means over seeds, Holm).",
        f"Against none: {words} (paired by seed, Holm).",
        [*relations, *(one for some in told.values() for one in some)],
    )


AGAINST_NONE = ("window 2", "LocAteR")


def _against_none(rows: list[Json], arm: str) -> list[Finding]:
    """Every measure, of one arm."""
    own = [(what, one) for name, what in METRICS.items() for one in findings(rows, name, what) if one.of == arm]
    return corrected([Finding(f"{arm} − none", what, one.estimate) for what, one in own])


STUDY = Study(
    question="Beyond perplexity, which measures move with localisation?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=intervals("rank correlation"),
    drawn=("over the mass on the last 4 tokens",),
    budget=f"34 runs of {NUM_STEPS:,} steps",
    setting=f"{trained_scale(NUM_STEPS, layers='two layers')}; every second text is random tokens that come again",
    judged=list,
    doubt="Models that copy well; word frequencies of a larger vocabulary.",
)
