"""Numbers of a head's attention: the four that are predicted and measured, and its profile."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..attention import statistics
from ..head import Head
from ..quantities import FIRST_QUERY

NAMES = ("near_mass_beyond_first", "normalised_entropy", "sink_mass", "mean_distance")


def distance_bins(length: int) -> list[tuple[int, int]]:
    """Spans of distance that double: 0, 1, 2 to 3, 4 to 7, …

    >>> distance_bins(6)
    [(0, 0), (1, 1), (2, 3), (4, 5)]
    """
    edges = [0, *(2**power for power in range(length.bit_length()) if 2**power < length), length]
    return [(low, high - 1) for low, high in zip(edges, edges[1:], strict=False)]


def first_query(length: int) -> int:
    """The first query that counts in texts of this length: FIRST_QUERY, in those that end before it the middle."""
    return FIRST_QUERY if length > FIRST_QUERY else length // 2


@dataclass(frozen=True)
class Numbers:
    """Means over queries from `first_query` on, of all texts.

    Defined in `attention.statistics`. `near_mass_beyond_first` leaves the first token out, unlike the monitor's
    `near_mass`; entropy, sink mass (the first token's) and distance are over all keys, the first included.
    `profile` is the share of the mass on other keys than the first, `logits` their mean logit, by `distance_bins`.
    """

    near_mass_beyond_first: float
    normalised_entropy: float
    sink_mass: float
    mean_distance: float
    profile: tuple[float, ...]
    logits: tuple[float, ...]

    def to_json(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in NAMES}


class Gatherer:
    """The numbers of one head, from its logits on one text after another. O(T²) memory for one text and head.

    `every` thins the queries: of texts that are drawn, more of them say more than more of their queries.
    """

    def __init__(self, head: Head, length: int, *, every: int = 1):
        positions = torch.arange(length)
        queries = positions[first_query(length) :: every]
        self.queries = queries
        self.admitted: Bool[Tensor, "queries keys"] = head.admits(queries, positions)
        self.distance = (queries[:, None] - positions).abs()
        self.sink = head.sink
        self.num_keys = self.admitted.sum(-1) + (head.sink is not None)  # a learned sink is one more outcome
        self.bins = torch.tensor([low for low, _ in distance_bins(length)])
        self.bin_of = torch.bucketize(self.distance[:, 1:].contiguous(), self.bins, right=True) - 1
        self.found: list[Tensor] = []

    def logits(self, head: Head, x: Float[Tensor, "batch tokens d_model"]) -> Float[Tensor, "batch queries keys"]:
        """The head's logits of the queries that count."""
        return head.logits(x[:, self.queries], x, (self.queries, torch.arange(x.shape[1])))

    def add(self, logits: Float[Tensor, "batch queries keys"]) -> None:
        """Take in the logits of the chosen queries for all keys."""
        masked = logits.masked_fill(~self.admitted, -torch.inf)
        if self.sink is not None:
            masked = torch.cat([masked, self.sink.to(masked).expand(*masked.shape[:-1], 1)], -1)
        p = masked.softmax(-1)
        entropy = statistics.normalise(statistics.entropy(p), self.num_keys)
        p = p[..., : logits.shape[-1]]
        mean_distance = statistics.mean_distance(p, self.distance)
        near = statistics.near_mass_beyond_first(p, self.distance)
        four = torch.stack([near, entropy, p[..., 0], mean_distance]).mean((1, 2))
        profile = self._sum_spans(statistics.beyond_first(p).mean(0)) / len(self.queries)
        counted = self.admitted[:, 1:].to(p)
        mean_logit = self._sum_spans(logits[..., 1:].mean(0) * counted) / self._sum_spans(counted).clamp(min=1)
        self.found.append(torch.cat([four, profile, mean_logit]))

    def _sum_spans(self, values: Float[Tensor, "queries others"]) -> Float[Tensor, " bins"]:
        """Sum over the pairs of each span of distances."""
        return values.new_zeros(len(self.bins)).index_add(0, self.bin_of.flatten(), values.flatten())

    def halves(self) -> tuple[Numbers, Numbers] | None:
        """The same of every other text, and of those between; None of a single text."""
        return None if len(self.found) < 2 else (self.numbers(slice(0, None, 2)), self.numbers(slice(1, None, 2)))

    def numbers(self, texts: slice = slice(None)) -> Numbers:  # noqa: B008
        """Means over some of the texts, all of them by default."""
        mean = torch.stack(self.found[texts]).mean(0).tolist()
        num_bins = len(self.bins)
        return Numbers(*mean[:4], profile=tuple(mean[4 : 4 + num_bins]), logits=tuple(mean[4 + num_bins :]))
