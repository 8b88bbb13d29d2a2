"""Attention on texts of sampled tokens, each at its position, but taken from different windows.

So every kind of token is there as often as it was: sinks, separators, repetitions of the first token. What independent
tokens lack in the mean logit, tr(W(Δ) Γ(Δ))/λ at the distance Δ, is added to it.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention.input_moments import InputMoments
from ..attention.statistics import NEAR
from ..head import Head
from ..models import AttentionModule
from ..projections import Projection
from .inputs import Inputs
from .numbers import Gatherer, Numbers
from .settings import Effort, Terms

EVERY = 4  # queries of a drawn text that are looked at: every fourth
NUM_ASKED = 8  # queries, spread over the windows, that say which tokens take all attention


@torch.no_grad()
def predict_layer(layer: AttentionModule, inputs: Inputs, *, effort: Effort, terms: Terms) -> list[Numbers]:
    """Predict each head of a layer on texts drawn from its inputs."""
    # Layers must not share their luck: it would not average out over the model.
    generator = torch.Generator().manual_seed(effort.seed + layer.number)
    ordinary = inputs.ordinary
    stay = takes_all(layer.heads, inputs) if terms.sinks else torch.zeros(inputs.windows.shape[:2], dtype=torch.bool)
    x = draw_texts(inputs, stay, terms=terms, count=effort.texts, generator=generator)
    sample = x[:, ordinary].flatten(0, 1)
    found = []
    for head in layer.heads:
        gatherer, added = Gatherer(head, inputs.length, every=EVERY), torch.zeros(())
        if inputs.lagged is not None:
            shift = lag_shift(head, inputs.lagged, sample, length=inputs.length)
            added = between(shift, ordinary, gatherer.queries)
        for text in x.split(1):
            gatherer.add(gatherer.logits(head, text) + added)
        found.append(gatherer.numbers())
    return found


def between(
    shift: Float[Tensor, " distances"], ordinary: Bool[Tensor, " tokens"], queries: Int[Tensor, " queries"]
) -> Float[Tensor, "queries keys"]:
    """The shift of every pair of ordinary positions; the lags leave the others out."""
    positions = torch.arange(len(ordinary))
    by_distance = shift[queries[:, None] - positions + len(ordinary) - 1]
    return by_distance * (ordinary[queries, None] & ordinary)


def takes_all(heads: Sequence[Head], inputs: Inputs) -> Bool[Tensor, "windows tokens"]:
    """Ordinary tokens that alone draw more than a typical window, of most queries of some head.

    More than the median over windows of Σ exp(logit). Queries ask from different places behind the text: no token
    draws most of them by its own place. Where most windows have such tokens there are none by this measure. Those that
    few windows have must not be shared out among all texts: a text that has one is another kind of text.
    """
    x, sample = inputs.windows, inputs.windows[:, inputs.ordinary].flatten(0, 1)
    asked = sample[torch.linspace(0, len(sample) - 1, NUM_ASKED).long()].expand(len(x), -1, -1)
    places = inputs.length + NEAR * torch.arange(1, 1 + NUM_ASKED), torch.arange(inputs.length)
    found = torch.zeros(x.shape[:2], dtype=torch.bool)
    for head in heads:
        logits = head.logits(asked, x, places)
        typical = logits.logsumexp(-1, keepdim=True).median(0).values
        found |= (logits > typical).float().mean(1) > 1 / 2
    return found & inputs.ordinary


def draw_texts(
    inputs: Inputs, stay: Bool[Tensor, "windows tokens"], *, terms: Terms, count: int, generator: torch.Generator
) -> Float[Tensor, "count tokens d_model"]:
    """Texts whose tokens come from different windows; each token of each window is used as often as any other.

    Those that `stay` do not move. Without the term `positions` tokens come from different positions too, but for the
    first and special ones.
    """
    rounds = -(-count // len(inputs.windows))
    return torch.cat([_round(inputs, stay, terms, generator) for _ in range(rounds)])[:count]


def _round(inputs: Inputs, stay: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
    """Every window once: at each position, an order of the windows that leaves some of them in their places."""
    x, windows = inputs.windows, torch.arange(len(inputs.windows))[:, None].expand_as(stay)
    if not terms.positions:
        free = ~stay & (inputs.ordinary | torch.tensor(not terms.first))
        tokens = x[free]
        x = x.masked_scatter(free[..., None], tokens[torch.randperm(len(tokens), generator=generator)])
    order = torch.rand(stay.shape, generator=generator).masked_scatter(stay, 2.0 + windows[stay]).argsort(0)
    places = torch.where(stay, 2.0 + windows, windows / len(x)).argsort(0)
    return x[torch.empty_like(order).scatter(0, places, order), torch.arange(inputs.length)]


def lag_shift(
    head: Head, lagged: InputMoments, sample: Float[Tensor, "tokens d_model"], *, length: int
) -> Float[Tensor, " distances"]:
    """tr(W(Δ) Γ(Δ))/λ at the distances −(length − 1) … length − 1, with 0 at distance 0.

    A text of independent tokens lacks exactly this in the mean; at distance 0 it lacks nothing. Between the lags
    collected Γ is interpolated, beyond them it stays. Norms of queries and keys are taken at their slope over `sample`,
    a soft-cap at its slope of 1.
    """
    head = head.anywhere()
    query, key = (effective(projection, sample) for projection in (head.query, head.key))
    if lagged.basis is not None:
        query, key = query @ lagged.basis, key @ lagged.basis
    distances = torch.arange(1, length)
    behind = traces(head, query @ lagged.core @ key.mT, lagged.lags, distances, length=length)
    ahead = torch.zeros_like(behind)
    if head.lookahead != 0:
        ahead = traces(head, query @ lagged.core.mT @ key.mT, lagged.lags, -distances, length=length)
    return torch.cat([ahead.flip(0), ahead.new_zeros(1), behind]).float() * head.scale


def effective(projection: Projection, sample: Float[Tensor, "tokens d_model"]) -> Float[Tensor, "d_head d_model"]:
    """W itself, or for a normed projection its rows times the slope of the output on W x over the sample."""
    weight = projection.weight.double()
    if projection.is_linear:
        return weight
    plain, out = sample.double() @ weight.mT, projection(sample).double()
    plain, out = plain - plain.mean(0), out - out.mean(0)
    slope = (plain * out).sum(0) / plain.square().sum(0).clamp(min=torch.finfo(plain.dtype).tiny)
    return weight * slope[:, None]


def traces(
    head: Head,
    products: Float[Tensor, "lags d_head d_head"],
    lags: tuple[int, ...],
    distances: Int[Tensor, " distances"],
    *,
    length: int,
) -> Float[Tensor, " distances"]:
    """E (R_Δ q)·k at each distance, from E q kᵀ at the lags.

    A pair of rows (i, j) that turns by θ per position gives cos(θΔ)(C_ii + C_jj) + sin(θΔ)(C_ij − C_ji).
    """
    at, diagonal = torch.tensor(lags), products.diagonal(dim1=-2, dim2=-1)
    if head.rotary is None:
        return interpolate(diagonal.sum(-1), at, distances.abs())
    first, second = head.rotary.pairs.unbind(-1)
    cosines = diagonal[:, first] + diagonal[:, second]
    sines = products[:, first, second] - products[:, second, first]
    angles = distances[:, None] * head.rotary.frequencies(length).to(products)
    turning = interpolate(torch.stack([cosines, sines], -1), at, distances.abs())
    turned = (turning * torch.stack([angles.cos(), angles.sin()], -1)).sum((-2, -1))
    still = interpolate(diagonal.sum(-1) - cosines.sum(-1), at, distances.abs())
    return turned * head.rotary.amplitude**2 + still


def interpolate(
    values: Float[Tensor, " lags *shape"], lags: Int[Tensor, " lags"], at: Int[Tensor, " distances"]
) -> Float[Tensor, " distances *shape"]:
    """Linear between the lags, constant beyond the last.

    >>> interpolate(torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0, 1, 5]), torch.tensor([0, 1, 3, 9])).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    upper = torch.searchsorted(lags, at).clamp(max=len(lags) - 1)
    lower = (upper - 1).clamp(min=0)
    share = ((at - lags[lower]) / (lags[upper] - lags[lower]).clamp(min=1)).clamp(0, 1).to(values)
    share = share.reshape(-1, *(1,) * (values.dim() - 1))
    return values[lower] * (1 - share) + values[upper] * share
