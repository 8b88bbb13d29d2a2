"""What heads do on texts drawn from the moments of a layer's inputs.

Tokens are Gaussian and independent, with what is kept apart put in its place; what independence lacks in the mean
logit, tr(W(Δ) Γ(Δ))/λ at the distance Δ, is added to it.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention.input_moments import InputMoments
from ..head import Head
from ..models import Layer
from ..projections import Projection
from .gaussian import Gaussian, around_offsets, lags_around_offsets, of_moments, position_offsets
from .inputs import Inputs
from .numbers import Gatherer, Numbers
from .settings import Effort, Terms

EVERY = 4  # queries of a drawn text that are looked at: every fourth


@torch.no_grad()
def predict_layer(layer: Layer, inputs: Inputs, *, effort: Effort, terms: Terms) -> list[Numbers]:
    """What each head of a layer does on texts drawn from the moments of its inputs."""
    # Layers must not share their luck: it would not average out over the model.
    generator = torch.Generator().manual_seed(effort.seed + layer.number)
    ordinary, lagged, offsets = of_moments(inputs.ordinary), inputs.lagged, None
    if terms.positions:
        offsets = position_offsets(inputs.by_position, inputs.counts, ordinary)
    if offsets is not None:
        ordinary = around_offsets(ordinary, offsets)
        lagged = lagged and lags_around_offsets(lagged, offsets)
    x, plain = draw_texts(inputs, ordinary, offsets=offsets, count=effort.texts, generator=generator)
    found = []
    for head in layer.heads:
        gatherer = Gatherer(head, inputs.length, every=EVERY)
        shift = None if lagged is None else lag_shift(head, lagged, x[plain], length=inputs.length)
        for text, is_ordinary in zip(x.split(1), plain, strict=True):
            logits = gatherer.logits(head, text)
            gatherer.add(logits if shift is None else logits + between(shift, is_ordinary, gatherer.queries))
        found.append(gatherer.numbers())
    return found


def between(
    shift: Float[Tensor, " distances"], ordinary: Tensor, queries: Int[Tensor, " queries"]
) -> Float[Tensor, "queries keys"]:
    """The shift of every pair of ordinary tokens; others are drawn from moments of their own and have no lags."""
    positions = torch.arange(len(ordinary))
    by_distance = shift[queries[:, None] - positions + len(ordinary) - 1]
    return by_distance * (ordinary[queries, None] & ordinary)


def draw_texts(
    inputs: Inputs,
    ordinary: Gaussian,
    *,
    offsets: Float[Tensor, "tokens d_model"] | None,
    count: int,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "count tokens d_model"], Bool[Tensor, "count tokens"]]:
    """Texts, and which of their tokens are ordinary.

    Tokens are independent of each other, which `lag_shift` makes up for in the mean of the logits.
    """
    length = inputs.length
    x = ordinary.draw(count * length, generator).unflatten(0, (count, length))
    x = x if offsets is None else x + offsets
    is_ordinary = torch.ones(count, length, dtype=torch.bool)
    if inputs.echo is not None:
        repeated = torch.rand(count, length, generator=generator) < inputs.echo_rate
        x[repeated] = inputs.echo.draw(int(repeated.sum()), generator)
        is_ordinary &= ~repeated
    for position, tokens in inputs.alone.items():
        x[:, position] = tokens.draw(count, generator)
        is_ordinary[:, position] = False
    return x, is_ordinary


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
