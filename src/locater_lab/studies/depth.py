"""LocAteR over depth, with and without warm-up; per layer, ρ beside the gradient that reaches each token of a place."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from locater.attention.capture import inputs_of
from locater.models import live, read_heads
from locater.records import Json
from locater.stabilisers import LocAteR
from locater.theory.profiles import profile

from .floors import ARMS as FLOORS
from .floors import UNIFORM
from .small import Ran, arms_by_seed, nothing, result, train_small, trained
from .statistics import Finding, corrected, paired, partial_correlation, rank_correlation, tally
from .study import Answer, Study, intervals
from .sweep.folder import Point
from .trained import findings

ARMS = {"none": nothing, "locater": lambda model: LocAteR(model, strength="auto"), UNIFORM: FLOORS[UNIFORM]}
NUM_TEXTS = 64
# At 1,000 steps and a rate of 3e-3 no depth beat the bigram table.
STEPS, RATE = 2000, 3.5e-3


def condition(depth: int, *, is_cold: bool) -> str:
    return f"{depth} layer{'s' if depth > 1 else ''}, {'no ' if is_cold else ''}warm-up"


# By name: depth, and whether the run is cold.
CONDITIONS = {condition(depth, is_cold=cold): (depth, cold) for depth in (1, 2, 4) for cold in (False, True)}


def grid(quick: bool) -> list[Point]:
    chosen = [name for name, (depth, _) in CONDITIONS.items() if depth < 4 or not quick]
    return arms_by_seed(dict.fromkeys(chosen, ARMS), quick=quick, short=40, steps=STEPS)


def measure(point: Point, place: Path) -> Json:
    depth, is_cold = CONDITIONS[point["condition"]]
    config = trained(point["seed"], point["steps"], num_layers=depth, learning_rate=RATE)
    ran = train_small(config, ARMS[point["arm"]], is_cold=is_cold)
    return result(ran) | (agreement(ran) if ran.is_finite else {name: [] for name in OVER_RHO})


def agreement(ran: Ran) -> dict[str, list[float]]:
    """Layer by layer, the rank correlation over tokens of ρ_t with the share of gradient that token t is sent.

    Both may only rise towards the query; the second is what is left at equal places.
    """
    tokens, targets = ran.data.batches.validation(0, NUM_TEXTS)
    sites = live.open_live(ran.model).sites
    shares = gradient_shares(ran.model, tokens, targets)
    with torch.no_grad(), inputs_of(dict(ran.model.named_modules()), [site.query_name for site in sites]) as seen:
        ran.model(tokens)
    found: dict[str, list[float]] = {name: [] for name in OVER_RHO}
    for site, x, share in zip(sites, seen, shares, strict=True):
        rho = torch.stack(
            [profile(head, length=x.shape[1], covariance=step_covariance(x)) for head in read_heads(site).heads]
        )
        # The query itself is left out: its gradient comes past attention too.
        ours, theirs = rho.mean(0)[:-1].tolist(), share[:-1].tolist()
        found["agreement"].append(rank_correlation(ours, theirs))
        found["agreement_at_place"].append(partial_correlation(ours, theirs, range(len(ours))))
    return {name: [value for value in values if value == value] for name, values in found.items()}


def step_covariance(x: Float[Tensor, "texts tokens d"]) -> Float[Tensor, "d d"]:
    """Step covariance of a random walk with these inputs' second moment, on average over its tokens."""
    flat = x.flatten(0, 1).double()
    return flat.mT @ flat / len(flat) / ((x.shape[1] + 1) / 2)


def gradient_shares(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> list[Float[Tensor, " tokens"]]:
    """|∂(loss of the last token)/∂x_t| of every layer's input, as shares of their sum; means over texts."""
    inputs: list[Tensor] = []

    def keep(layer: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        given[0].retain_grad()
        inputs.append(given[0])

    hooks = [layer.register_forward_pre_hook(keep) for layer in model.layers]  # type: ignore
    try:
        with torch.enable_grad():
            last = model(tokens)[:, -1]
            torch.nn.functional.cross_entropy(last, targets[:, -1], reduction="sum").backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    lengths = [one.grad.norm(dim=-1) for one in inputs if one.grad is not None]
    return [(one / one.sum(-1, keepdim=True)).mean(0) for one in lengths]


def conclude(rows: list[Json]) -> Answer:
    losses = [
        replace(one, of=one.of.removeprefix("locater with "))
        for one in findings(rows, "best_loss", "validation loss, LocAteR − none")
    ]
    crude, at_place = (corrected(_over_rho(rows, name, what)) for name, what in OVER_RHO.items())
    return Answer(
        f"The loss with LocAteR against none: {tally(losses)} (paired by seed, Holm).",
        "From token to token, as ρ (from the layer's own inputs) grows, the share of gradient that arrives "
        f"{tally(crude)}; at equal places in the text: {tally(at_place) or 'not measured'} (rank correlations, means "
        "over layers, against 0, Holm).",
        [*losses, *at_place, *crude],
    )


def _over_rho(rows: list[Json], name: str, what: str) -> list[Finding]:
    """One for each depth, of the models that are left alone: its mean over layers and conditions, seed by seed."""
    found = []
    for depth in sorted({CONDITIONS[row["condition"]][0] for row in rows}):
        values: dict[int, list[float]] = {}
        for row in (row for row in rows if CONDITIONS[row["condition"]][0] == depth and row["arm"] == "none"):
            values.setdefault(row["seed"], []).extend(row.get(name, ()))
        known = {seed: fmean(some) for seed, some in values.items() if some}
        words = f"{depth} layer{'s' if depth > 1 else ''}"
        found += [Finding(what, words, paired(known, dict.fromkeys(known, 0.0)), "relation")] if known else []
    return found


OVER_RHO = {"agreement": "share of gradient over ρ", "agreement_at_place": "share of gradient over ρ, at equal places"}


STUDY = Study(
    question="Does what one layer shows carry over to 2 and 4, with and without warm-up, and does ρ hold per layer?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=intervals("estimate and its interval"),
    drawn=("validation loss, LocAteR − none", *OVER_RHO.values()),
    judged=list,
    budget=f"72 runs of {STEPS:,} steps",
    setting=f"width 64 with 2 heads, {STEPS:,} steps, learning rate {RATE:g}, κ = auto; without warm-up a run has "
    "the same rates from its end on",
    doubt="Longer runs; other strengths at each depth; another walk for the inputs than one of their second moment.",
)
