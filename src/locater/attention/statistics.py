"""What attention does, in numbers: the definitions, computed from materialised logits.

`streaming` gives the same numbers without the matrix; this file is what it is held against.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

NEAR = 16  # keys counted as near the query, itself included

PerQuery = Float[Tensor, "*batch heads queries"]


@dataclass(frozen=True)
class Statistics:
    """Numbers of every query of every head; NaN where a query has none.

    A query without an admissible key has no statistics, one with a single key no normalised entropy.
    `sink_mass` lies on the first token, `near_mass` on the keys at a distance below the chosen one.
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
    entropy = torch.special.entr(p).sum(-1)
    distance = distance.abs()
    sink = torch.zeros_like(num_keys) if sink is None else sink.expand_as(num_keys)
    return finish(
        entropy=entropy,
        max_logit=logits.amax(-1),
        sink_mass=p.gather(-1, sink[..., None].clamp(min=0))[..., 0],
        near_mass=(p * (distance < near)).sum(-1),
        mean_distance=(p * distance).sum(-1),
        participation=1 / p.square().sum(-1),
        num_keys=num_keys,
    )


def finish(*, entropy: PerQuery, num_keys: Int[Tensor, "*batch heads queries"], **numbers: Tensor) -> Statistics:
    """Normalise the entropy, and leave out what rows without keys cannot have."""
    some = num_keys > 0
    normalised = entropy / num_keys.clamp(min=2).to(entropy).log()
    found = {name: values.where(some, torch.nan) for name, values in {"entropy": entropy, **numbers}.items()}
    normalised = normalised.where(num_keys > 1, torch.nan)
    return Statistics(normalised_entropy=normalised, num_keys=num_keys, **found)
