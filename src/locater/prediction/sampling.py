"""Attention on texts of sampled tokens, each at its position, but taken from different windows.

So every kind of token is there as often as it was: sinks, separators, repetitions of the first token. What independent
tokens lack in the mean logit, tr(W(Δ) Γ(Δ))/λ at the distance Δ, is added to it. One pass over the calibration windows
keeps of a layer's inputs some windows as they are, and lagged covariances over all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention.input_moments import InputMoments, MomentsCollector
from ..head import Head
from ..models import AttentionModule
from ..projections import Projection, widen
from ..quantities import NEAR
from .numbers import Gatherer, Numbers
from .windows import Effort, Terms, spread_evenly

EVERY = 4  # queries of a drawn text that are looked at: every fourth
NUM_ASKED = 8  # queries, spread over the windows, that say which tokens take all attention
# Distances at which lagged covariances are collected; beyond the last they are taken to stay as they are.
LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Tokens of a layer that are kept: memory grows neither with the text nor, down to a few windows, with their length.
MOST_TOKENS = 8192
FEWEST_WINDOWS = 4


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Windows of one layer's inputs, and Γ(Δ): what the product of two tokens Δ apart has more in one window.

    More, that is, than in texts whose tokens come from different windows. `alone` are the positions of the first token
    and of special ones, which Γ leaves out.
    """

    windows: Float[Tensor, "windows tokens d_model"]
    alone: tuple[int, ...]
    lagged: InputMoments | None

    @property
    def length(self) -> int:
        return self.windows.shape[1]

    @property
    def ordinary(self) -> Bool[Tensor, " tokens"]:
        """Positions that hold tokens of the text."""
        return ordinary_positions(self.length, self.alone)


def ordinary_positions(length: int, alone: Sequence[int]) -> Bool[Tensor, " tokens"]:
    ordinary = torch.ones(length, dtype=torch.bool)
    ordinary[list(alone)] = False
    return ordinary


def kept_windows(total: int, *, length: int, texts: int) -> Bool[Tensor, " windows"]:
    """Choose the windows that are kept: one for each text that will be drawn, fewer where they are long, evenly.

    >>> kept_windows(6, length=256, texts=3).int().tolist(), int(kept_windows(24, length=4096, texts=16).sum())
    ([0, 1, 0, 1, 0, 1], 4)
    """
    return spread_evenly(total, min(total, texts, max(FEWEST_WINDOWS, MOST_TOKENS // length)))


class InputsCollector:
    """Sums over windows, one `add` per batch; memory O(T d) for each window in `kept`, and O(r²) for each lag.

    `lag_rank` bounds the rank r of the lagged covariances (a basis of principal directions).
    """

    def __init__(self, *, alone: Sequence[int], terms: Terms, lag_rank: int | None, length: int, kept: Tensor):
        self.alone, self.terms, self.kept = tuple(alone), terms, kept
        self.ordinary = ordinary_positions(length, alone)
        lags = [lag for lag in LAGS if lag < length - 1]
        self.lagged = MomentsCollector(lags=lags, rank=lag_rank) if terms.lags else None
        self.windows: list[Tensor] = []
        self.sums = torch.zeros(())  # by position, from the first batch on
        self.num_windows = 0

    @torch.no_grad()
    def add(self, x: Float[Tensor, "batch tokens d_model"]) -> None:
        """Take in the inputs of some windows."""
        x = widen(x).cpu()
        self.windows.append(x[self.kept[self.num_windows : self.num_windows + len(x)]])
        if self.lagged is not None:
            self.lagged.add(x, valid=self.ordinary.expand(x.shape[:2]))
            self.sums = self.sums + x.sum(0)
        self.num_windows += len(x)

    def inputs(self) -> LayerInputs:
        """Inputs computed from the sums."""
        windows = torch.cat(self.windows)
        lagged = None if self.lagged is None else self.lagged.moments()
        if lagged is not None and self.terms.positions:
            lagged = beyond_positions(lagged, self.sums / self.num_windows, self.ordinary)
            # Means over all W windows have both tokens of one window once in W, a draw of k windows once in k.
            share = (1 - 1 / len(windows)) * self.num_windows / max(self.num_windows - 1, 1)
            lagged = replace(lagged, core=lagged.core * share)
        return LayerInputs(windows, self.alone, lagged)


def beyond_positions(
    lagged: InputMoments, by_position: Float[Tensor, "tokens d_model"], ordinary: Bool[Tensor, " tokens"]
) -> InputMoments:
    """The lagged covariances around the mean m_t of each position: Γ(Δ) − mean of (m_t − m)(m_{t−Δ} − m)ᵀ."""
    inside = (by_position.double() - lagged.mean) * ordinary[:, None]
    inside = inside if lagged.basis is None else inside @ lagged.basis
    parts = []
    for lag in lagged.lags:
        later, earlier = slice(lag, None), slice(len(inside) - lag)
        num_pairs = (ordinary[later] & ordinary[earlier]).sum()
        parts.append(inside[later].mT @ inside[earlier] / num_pairs)
    return replace(lagged, core=lagged.core - torch.stack(parts))


@torch.no_grad()
def predict_layer(layer: AttentionModule, inputs: LayerInputs, *, effort: Effort, terms: Terms) -> list[Numbers]:
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
            added = shift_between(shift, ordinary, gatherer.queries)
        for text in x.split(1):
            gatherer.add(gatherer.logits(head, text) + added)
        found.append(gatherer.numbers())
    return found


def shift_between(
    shift: Float[Tensor, " distances"], ordinary: Bool[Tensor, " tokens"], queries: Int[Tensor, " queries"]
) -> Float[Tensor, "queries keys"]:
    """The shift of every pair of ordinary positions; the lags leave the others out."""
    positions = torch.arange(len(ordinary))
    by_distance = shift[queries[:, None] - positions + len(ordinary) - 1]
    return by_distance * (ordinary[queries, None] & ordinary)


def takes_all(heads: Sequence[Head], inputs: LayerInputs) -> Bool[Tensor, "windows tokens"]:
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
    inputs: LayerInputs, stay: Bool[Tensor, "windows tokens"], *, terms: Terms, count: int, generator: torch.Generator
) -> Float[Tensor, "count tokens d_model"]:
    """Texts whose tokens come from different windows; each token of each window is used as often as any other.

    Those that `stay` do not move. Without the term `positions` tokens come from different positions too, but for the
    first and special ones.
    """
    rounds = -(-count // len(inputs.windows))
    return torch.cat([_round(inputs, stay, terms, generator) for _ in range(rounds)])[:count]


def _round(inputs: LayerInputs, stay: Tensor, terms: Terms, generator: torch.Generator) -> Tensor:
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
        return interpolate_lags(diagonal.sum(-1), at, distances.abs())
    first, second = head.rotary.pairs.unbind(-1)
    cosines = diagonal[:, first] + diagonal[:, second]
    sines = products[:, first, second] - products[:, second, first]
    angles = distances[:, None] * head.rotary.frequencies(length).to(products)
    turning = interpolate_lags(torch.stack([cosines, sines], -1), at, distances.abs())
    turned = (turning * torch.stack([angles.cos(), angles.sin()], -1)).sum((-2, -1))
    still = interpolate_lags(diagonal.sum(-1) - cosines.sum(-1), at, distances.abs())
    return turned * head.rotary.amplitude**2 + still


def interpolate_lags(
    values: Float[Tensor, " lags *shape"], lags: Int[Tensor, " lags"], at: Int[Tensor, " distances"]
) -> Float[Tensor, " distances *shape"]:
    """Linear between the lags, constant beyond the last.

    >>> interpolate_lags(torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0, 1, 5]), torch.tensor([0, 1, 3, 9])).tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    upper = torch.searchsorted(lags, at).clamp(max=len(lags) - 1)
    lower = (upper - 1).clamp(min=0)
    share = ((at - lags[lower]) / (lags[upper] - lags[lower]).clamp(min=1)).clamp(0, 1).to(values)
    share = share.reshape(-1, *(1,) * (values.dim() - 1))
    return values[lower] * (1 - share) + values[upper] * share
