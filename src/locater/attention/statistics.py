"""Statistics of attention: the only definitions, as functions of probabilities p over materialised keys.

`streaming` gives the same numbers without the matrix; this file is what it is held against.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEAR = 16  # keys counted as near the query, itself included
FIRST_QUERY = 64  # earlier queries have few keys: nearly all of them are near

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
class Mean:
    """The mean over a head's queries, over how many, and the standard error of having seen only a sample of them."""

    value: Float[Tensor, " heads"]
    count: Int[Tensor, " heads"]
    standard_error: Float[Tensor, " heads"]


def mean_over_queries(numbers: PerQuery, *, seen: float = 1.0) -> Mean:
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
    return Mean(value, count, (square * max(0.0, 1 - seen)).sqrt() / count)


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
