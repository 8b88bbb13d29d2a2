"""Statistics of attention: the only definitions, as functions of probabilities p over materialised keys.

`streaming` gives the same numbers without the matrix; this file is what it is held against. Also how similar the tokens
of a text are: measures of the rank of their representations X (tokens × d).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..projections import widen
from ..quantities import NEAR

PerQuery = Float[Tensor, "*batch heads queries"]


@dataclass(frozen=True)
class Statistics:
    """Numbers of every query of every head; NaN where a query has none.

    A query without an admissible key has no statistics, one with a single key no normalised entropy.
    `sink_mass` lies on the first token, `near_mass` on the keys at a distance below the chosen one, the first token
    among them if it is that near; prediction asks for `near_mass_beyond_first` instead.
    """

    entropy: PerQuery  # −Σ p log p
    normalised_entropy: PerQuery  # entropy / log n
    max_logit: PerQuery
    sink_mass: PerQuery
    near_mass: PerQuery
    mean_distance: PerQuery  # Σ p |i − j|
    participation: PerQuery  # 1 / Σ p²
    num_keys: Int[Tensor, "*batch heads queries"]  # n, the admissible keys

    def numbers(self) -> Iterator[tuple[str, PerQuery]]:
        """Names and tensors of all but the count."""
        for field in fields(self):
            if field.name != "num_keys":
                yield field.name, getattr(self, field.name)


NAMES: tuple[str, ...] = tuple(field.name for field in fields(Statistics) if field.name != "num_keys")


@dataclass(frozen=True)
class QueryMean:
    """The mean over a head's queries, over how many, and the standard error of having seen only a sample of them."""

    value: Float[Tensor, " heads"]
    count: Int[Tensor, " heads"]
    standard_error: Float[Tensor, " heads"]


def mean_over_queries(numbers: PerQuery, *, seen: float = 1.0) -> QueryMean:
    """The mean of the entries that are not NaN per head; `seen` is the share of the queries that these are a sample of.

    The texts of a batch share the draw, so a draw counts once: with the sum s_i and the count c_i of query i over the
    texts, error² = (1 − seen) · q/(q − 1) · Σ (s_i − c_i · mean)² / (Σ c_i)², zero when every query was seen.
    """
    numbers = numbers.reshape(-1, *numbers.shape[-2:])
    sums, counts = numbers.nansum(0), (~numbers.isnan()).sum(0)
    count = counts.sum(-1)
    value = sums.sum(-1) / count
    num_queries = numbers.shape[-1]
    square = (sums - counts * value[:, None]).square().sum(-1) * num_queries / max(1, num_queries - 1)
    return QueryMean(value, count, (square * max(0.0, 1 - seen)).sqrt() / count)


Probabilities = Float[Tensor, "*batch queries keys"]
Distances = Int[Tensor, "*#batch queries keys"]


def entropy(p: Probabilities) -> Float[Tensor, "*batch queries"]:
    """−Σ p log p, in nats."""
    return torch.special.entr(p).sum(-1)


def normalise(entropy: Tensor, num_keys: Tensor) -> Tensor:
    """entropy / log n: 0 for one key, 1 for all alike; NaN where there are fewer than two keys."""
    return (entropy / num_keys.clamp(min=2).to(entropy).log()).where(num_keys > 1, torch.nan)


def near_mass(p: Probabilities, distance: Distances, near: int = NEAR) -> Float[Tensor, "*batch queries"]:
    """Σ p over the keys at a distance below `near`, on either side, the first token included."""
    return (p * (distance.abs() < near)).sum(-1)


def beyond_first(p: Probabilities) -> Float[Tensor, "*batch queries others"]:
    """Share of each other key in the mass that is not on the first key.

    1 − p loses all digits where the first token takes nearly everything; the sum of the others does not.
    """
    others = p[..., 1:]
    return others / others.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)


def near_mass_beyond_first(p: Probabilities, distance: Distances, near: int = NEAR) -> Float[Tensor, "*batch queries"]:
    """The near keys' share of the mass that is not on the first key: what a sink leaves of locality."""
    return near_mass(beyond_first(p), distance[..., 1:], near)


def mean_distance(p: Probabilities, distance: Distances) -> Float[Tensor, "*batch queries"]:
    """Σ p |i − j|."""
    return (p * distance.abs()).sum(-1)


def participation(p: Probabilities) -> Float[Tensor, "*batch queries"]:
    """1 / Σ p²: how many keys share the mass."""
    return 1 / p.square().sum(-1)


def materialised(
    logits: Float[Tensor, "*batch heads queries keys"],
    admitted: Bool[Tensor, "*#batch #heads queries keys"],
    distance: Int[Tensor, "*#batch #heads queries keys"],
    *,
    near: int = NEAR,
    sink: Int[Tensor, "*#batch #heads queries"] | None = None,
) -> Statistics:
    """All statistics from the whole matrix of logits, O(T²) memory. `sink` is each query's first token, else key 0."""
    logits = logits.masked_fill(~admitted, -torch.inf)
    num_keys = admitted.expand_as(logits).sum(-1)
    p = logits.softmax(-1)
    sink = torch.zeros_like(num_keys) if sink is None else sink.expand_as(num_keys)
    return finish(
        entropy=entropy(p),
        max_logit=logits.amax(-1),
        sink_mass=p.gather(-1, sink[..., None].clamp(min=0))[..., 0],
        near_mass=near_mass(p, distance, near),
        mean_distance=mean_distance(p, distance),
        participation=participation(p),
        num_keys=num_keys,
    )


def finish(*, entropy: PerQuery, num_keys: Int[Tensor, "*batch heads queries"], **numbers: Tensor) -> Statistics:
    """Normalise the entropy, and leave out what rows without keys cannot have."""
    some = num_keys > 0
    known = {name: values.where(some, torch.nan) for name, values in {"entropy": entropy, **numbers}.items()}
    return Statistics(normalised_entropy=normalise(entropy, num_keys), num_keys=num_keys, **known)


@dataclass(frozen=True)
class Rank:
    """Four views of rank collapse, one number per text; NaN where a text has too few tokens, or is not finite.

    Residual 0, cosine 1, ranks 1: all tokens are alike.
    """

    residual: Float[Tensor, " batch"]  # ‖X − 1x̄^T‖_F / ‖X‖_F
    mean_cosine: Float[Tensor, " batch"]  # over all pairs of different tokens
    stable_rank: Float[Tensor, " batch"]  # ‖X‖_F² / ‖X‖₂²
    effective_rank: Float[Tensor, " batch"]  # exp of the entropy of the normalised singular values


def residual(
    x: Float[Tensor, "*batch tokens d_model"], valid: Bool[Tensor, "*batch tokens"] | None = None
) -> Float[Tensor, "*batch"]:
    """‖X − 1x̄^T‖_F / ‖X‖_F over the valid tokens: 0 when all are alike."""
    if valid is None:
        centred = x - x.mean(-2, keepdim=True)
    else:
        x = x * valid[..., None]
        centred = (x - (x.sum(-2) / valid.sum(-1, keepdim=True))[..., None, :]) * valid[..., None]
    return torch.linalg.matrix_norm(centred) / torch.linalg.matrix_norm(x)


def rank(
    x: Float[Tensor, "batch tokens d_model"], *, valid: Bool[Tensor, "batch tokens"] | None = None, most: int = 128
) -> Rank:
    """Residual and cosine over all valid tokens, O(T d); the ranks over at most `most` of them, evenly spaced.

    One token is like all others and has none of these: NaN (a step of generation is no collapse). Ranks are bounded by
    the number of tokens they are taken over: compare them at one `most` only. Their cost is one
    eigenvalue problem of that size per text; singular values below √ε of the largest are lost in it.
    """
    x = widen(x)
    valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
    x = x * valid[..., None]
    count = valid.sum(-1)
    directions = torch.nn.functional.normalize(x, dim=-1)
    pairs = directions.sum(-2).square().sum(-1) - directions.square().sum((-2, -1))
    singular = _singular_values(_thinned(x, valid, most))
    share = singular / singular.sum(-1, keepdim=True)
    several = count > 1
    return Rank(
        residual=residual(x, valid).where(several, torch.nan),
        mean_cosine=(pairs / (count * (count - 1))).where(several, torch.nan),
        stable_rank=(singular.square().sum(-1) / singular.square().amax(-1)).to(x).where(several, torch.nan),
        effective_rank=torch.special.entr(share).sum(-1).exp().to(x).where(several, torch.nan),
    )


def _singular_values(x: Float[Tensor, "batch tokens d_model"]) -> Float[Tensor, "batch least"]:
    """Through the smaller Gram matrix, in float64."""
    x = x.double()
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    # The solver raises an error on what is not finite, and who watches an exploding run wants to go on watching.
    finite = gram.isfinite().all(-1).all(-1)[..., None]
    return torch.linalg.eigvalsh(gram.where(finite[..., None], 0.0)).clamp(min=0).sqrt().where(finite, torch.nan)


def _thinned(x: Tensor, valid: Tensor, most: int) -> Tensor:
    """At most that many rows: the valid ones first in order, then evenly spaced; padding adds only zeros."""
    count = int(valid.sum(-1).max())
    order = torch.sort(valid.int(), dim=-1, descending=True, stable=True).indices[:, :count]
    if count <= most:
        return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))
    # Spaced within each text's own valid tokens; a text shorter than that keeps all of its own, and zeros.
    every, number = torch.arange(most, device=x.device), valid.sum(-1, keepdim=True)
    steps = (every * number // most).where(number > most, every)
    return x.gather(1, order.gather(1, steps)[..., None].expand(-1, -1, x.shape[-1]))
