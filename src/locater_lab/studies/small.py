"""Runs of seconds, for studies: a loop of one's own around the library's parts; what a study changes is passed in."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch.optim import Optimizer

from locater.attention.calls import AttentionCall
from locater.attention.interception import Interception
from locater.attention.registered import Functions
from locater.records import Json
from locater.stabilisers import Stabiliser

from ..data.sources import Data, open_data
from ..train.config import Config, make_config
from ..train.model import LanguageModel
from ..train.observe import directions, spectra
from ..train.parts import learning_rate, make_model, make_optimizer
from .floors import ARMS as FLOORS
from .floors import FLOOR_SEEDS, count_floors
from .sweep.folder import Point
from .synthetic import near_share, normalised_entropy

# The model of all studies that train many: one layer of the paper's kind, on the text that every machine has.
TINY: dict[str, Any] = dict(data="embedded", tokenizer="bpe", bpe_size=512, context=32, d_model=32, d_feedforward=64)
TINY |= dict(num_heads=2, batch=8, steps=300, warmup=30, learning_rate=1e-2, qkv_gain=1.0)
SCALE = "one layer of width 32 with 2 heads, 512 byte pairs, texts of 32 tokens, 300 steps of 8 texts"
# Long enough that attention matters, which 300 steps are not: runs/setting.py searched for the least.
STEPS = 1500
TRAINED: dict[str, Any] = dict(d_model=64, d_feedforward=128, learning_rate=5e-3, qkv_gain=0.7071)
TRAINED |= dict(schedule="cosine", final_share=0.02)


def trained_scale(steps: int = STEPS, layers: str = "one layer") -> str:
    return f"{layers} of width 64 with 2 heads, 512 byte pairs, texts of 32 tokens, {steps:,} steps of 8 texts"


TRAINED_SCALE = trained_scale()
VALIDATED = 256  # texts

# Made from a model before its optimiser; or, if `late`, from both.
Attach = Callable[..., Stabiliser]
Each = Callable[[int, float, LanguageModel], None]
Task = Callable[[Data], Data]


@dataclass(frozen=True)
class Ran:
    """A model that was trained, what it was trained on, and the loss of every step; the last may not be finite."""

    model: LanguageModel
    data: Data
    stabiliser: Stabiliser
    losses: list[float]
    seconds: float  # of the processor, for all steps

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses[-1:]))


def seeds(quick: bool) -> range:
    """Five, for Holm's correction over twenty arms leaves three pairs no room; three in a miniature."""
    return range(3 if quick else 5)


def arms_by_seed(arms: Mapping[str, Iterable[str]], *, quick: bool, short: int, steps: int = STEPS) -> list[Point]:
    """Arms of every condition, seeds outermost: wherever a sweep stops, arms can be compared on the seeds that ended.

    Floors are measured on the first seeds alone.
    """
    return [
        {"name": "-".join(filter(None, (condition, arm, f"seed{seed}"))), "condition": condition, "arm": arm}
        | {"seed": seed, "steps": short if quick else steps}
        for seed in seeds(quick)
        for condition, some in arms.items()
        for arm in some
        if seed < FLOOR_SEEDS or arm not in FLOORS
    ]


def nothing(model: LanguageModel) -> Stabiliser:
    return Stabiliser()


def read_study_text(data: Data) -> Data:
    return data


def tiny(seed: int, **changed: object) -> Config:
    return make_config("paper", **{**TINY, "seed": seed, **changed})


def trained(seed: int, steps: int = STEPS, **changed: object) -> Config:
    """The setting of the studies that judge losses: to the end of a cosine, from fairseq's start."""
    return tiny(seed, **{**TRAINED, "steps": steps, "warmup": steps // 10, **changed})


def train_small(
    config: Config,
    attach: Attach = nothing,
    *,
    late: bool = False,
    each: Each | None = None,
    until: int | None = None,
    task: Task = read_study_text,
    is_cold: bool = False,
) -> Ran:
    """Train to the last step, or `until` one, or to the first whose loss is no number.

    `each` sees step, loss and model; `task` changes what is read. A cold run starts at the highest rate, and has the
    rates of the others from the end of the warm-up on.
    """
    data = open_data(config.data, length=config.shape.context, seed=config.loop.seed)
    model = make_model(config, data)
    data = task(data)
    assert isinstance(model, LanguageModel)
    stabiliser = Stabiliser() if late else attach(model)
    optimizer = make_optimizer(model, config.optimiser)
    for group in optimizer.param_groups:
        group["fused"] = True  # one call for all weights, which are many and small
    if late:
        stabiliser = attach(model, optimizer)
    model.train()
    losses, start = [], time.process_time()
    with Functions():  # entered once, so that no step looks through all modules for kernels
        for step in range(config.loop.steps if until is None else until):
            place = max(step, config.optimiser.warmup) if is_cold else step
            set_rate(optimizer, learning_rate(place, config.optimiser, num_steps=config.loop.steps))
            loss = _step(config, data, model, stabiliser, optimizer, step)
            losses.append(loss)
            if not math.isfinite(loss):
                break
            if each is not None:
                each(step, loss, model)
    return Ran(model.eval(), data, stabiliser, losses, time.process_time() - start)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _step(
    config: Config, data: Data, model: LanguageModel, stabiliser: Stabiliser, optimizer: Optimizer, step: int
) -> float:
    tokens, targets = data.batches.training(step * config.loop.batch, config.loop.batch)
    # All logits at once: they are few here, and pieces cost more than they save.
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    (loss + stabiliser.penalty()).backward()
    longest = config.optimiser.clip or math.inf
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), longest)
    if math.isfinite(float(norm)):
        optimizer.step()
        stabiliser.step()
    return float(loss.detach()) if math.isfinite(float(norm)) else math.nan


@torch.no_grad()
def validation_loss(ran: Ran, count: int = VALIDATED) -> float:
    """Validation loss of a model that still gives finite numbers; the loss of guessing otherwise."""
    tokens, targets = ran.data.batches.validation(0, min(count, ran.data.batches.num_validation))
    loss = float(ran.model(tokens, targets)) if ran.is_finite else math.nan
    return loss if math.isfinite(loss) else math.log(ran.model.config.vocab_size)


@torch.no_grad()
def observed(ran: Ran, count: int = 64) -> Json:
    """Entropy, mass on the last tokens and largest logit of all heads on held-out texts, as the kernel is given them.

    Read from the calls themselves, so that stabilisers that change a call are seen at work.
    """
    found: list[tuple[float, float, float]] = []

    def see(call: AttentionCall) -> None:
        logits = call.masked(call.raw()) if call.logits is None else call.logits
        weights = logits.softmax(-1).double()
        found.append((float(normalised_entropy(weights)), float(near_share(weights)), float(logits.max())))

    if ran.is_finite:
        with Interception(see, written_out=True):  # some penalties write attention out
            ran.model(ran.data.batches.validation(0, count)[0])
    entropy, near, largest = (sum(values) / len(found) for values in zip(*found, strict=True)) if found else (0.0,) * 3
    return {"entropy": entropy, "near_mass": near, "largest_logit": largest}


def spectrum(ran: Ran) -> Json:
    """η/λ, ξ, tr W/λ and the theory's localisation, means over heads; and how many directions W has left."""
    heads = spectra(ran.model, length=ran.model.config.context) if ran.is_finite else []
    if not heads:
        return {}
    found = {
        "eta_over_temperature": fmean(head["eta"] / head["temperature"] for head in heads),
        "trace_over_temperature": fmean(head["trace"] / head["temperature"] for head in heads),
        "xi": fmean(head["xi"] for head in heads),
        "localisation": fmean(head["localisation"] for head in heads),
    }
    return found | {"directions": directions(ran.model)}


def result(ran: Ran) -> Json:
    """Summarise a run, and give what tables of counts have on the same texts."""
    texts = ran.data.batches.validation(0, min(VALIDATED, ran.data.batches.num_validation))
    found = {"best_loss": validation_loss(ran)} | observed(ran) | spectrum(ran)
    return found | count_floors(ran.data, *texts)
