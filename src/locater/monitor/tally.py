"""Sums over everything observed of one layer: small, mergeable, one vector per layer for one reduction per report."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention import NAMES, NEAR, Blocks, Rank, Statistics, rank
from ..errors import refusal

Mode = Literal["training", "no_grad", "evaluation"]  # no_grad: in training mode, without gradients
MODES: tuple[Mode, ...] = get_args(Mode)
RANKS: tuple[str, ...] = tuple(field.name for field in fields(Rank))
RANK_TEXTS = 4  # texts of a batch whose representations are measured
LEAST_QUERIES = 16
LEAST_SHARE = 1 / 64  # of a layer's budget; below, a pass is not looked at
# Per statistic and head, over draws i of a query with sum s and count c over the texts of a batch.
SUM, COUNT, SUM_SQUARE, SUM_COUNT, COUNT_SQUARE = range(5)
# Per layer: queries looked at, queries there were, queries without a key and with one, passes seen, Σ log n.
LOOKED_AT, THERE, WITHOUT_KEYS, WITH_ONE_KEY, PASSES, LOG_KEYS, CLUSTERS = range(7)


@dataclass
class Tally:
    """Running sums of one layer."""

    statistics: Tensor  # (statistic, head, 5)
    counts: Tensor  # (7,)
    ranks: Tensor  # (measure, 2): sum and count
    maximum: Tensor  # (head,): the largest logit

    @classmethod
    def empty(cls, num_heads: int, device: torch.device | str = "cpu") -> "Tally":
        wide = torch.float32 if torch.device(device).type == "mps" else torch.float64  # where there is any
        new = torch.zeros(len(NAMES), num_heads, 5, dtype=wide, device=device)
        ranks = new.new_zeros(len(RANKS), 2)
        return cls(new, new.new_zeros(7), ranks, new.new_full((num_heads,), -math.inf))

    def add(self, found: Statistics, *, num_there: int, x: Tensor | None, valid: Tensor | None) -> None:
        """Take in one observation, and the ranks of its layer's input x; nothing is brought to the CPU."""
        for index, (_, numbers) in enumerate(found.numbers()):
            sums, counts = numbers.nansum(0).to(self.statistics), (~numbers.isnan()).sum(0).to(self.statistics)
            parts = (sums, counts, sums.square(), sums * counts, counts.square())
            self.statistics[index] += torch.stack(parts, -1).sum(1)
        largest = found.max_logit.nan_to_num(-math.inf).amax((0, 2)).to(self.maximum)
        self.maximum = torch.maximum(self.maximum, largest)
        num_keys = found.num_keys[:, 0]
        log_keys = num_keys.clamp(min=1).to(self.counts).log().sum()
        looked, without, one = num_keys.numel(), (num_keys == 0).sum(), (num_keys == 1).sum()
        self.counts += torch.stack([torch.as_tensor(value).to(self.counts) for value in (
            looked, num_there, without, one, 1, log_keys, num_keys.shape[-1])])  # fmt: skip
        if x is not None:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                valid = None if valid is None or valid.shape[1] != x.shape[1] else valid[:RANK_TEXTS]
                measured = rank(x.detach()[:RANK_TEXTS], valid=valid)
            for index, name in enumerate(RANKS):
                values = getattr(measured, name)
                self.ranks[index, 0] += values.nansum().to(self.ranks)
                self.ranks[index, 1] += (~values.isnan()).sum()

    @property
    def has_seen_any(self) -> bool:
        return bool(self.counts[PASSES] > 0)

    def vector(self) -> Tensor:
        return torch.cat([part.flatten() for part in self._parts()])

    def _parts(self) -> tuple[Tensor, ...]:
        return self.statistics, self.counts, self.ranks, self.maximum

    @classmethod
    def of_vectors(cls, rows: Tensor, num_heads: int) -> "Tally":
        """One tally of several, each a row: sums add up, the largest logit is the largest of all."""
        model = cls.empty(num_heads)
        statistics, counts, ranks, maximum = rows.cpu().split([part.numel() for part in model._parts()], -1)
        return cls(
            statistics.sum(0).view_as(model.statistics),
            counts.sum(0),
            ranks.sum(0).view_as(model.ranks),
            maximum.amax(0),
        )


def merge_tallies(tallies: Sequence[Tally], group: dist.ProcessGroup | None = None) -> list[Tally]:
    """The same tallies over all processes, by one collective call; alone, only brought to the CPU."""
    if not tallies:
        return []
    vectors = [tally.vector() for tally in tallies]
    whole = torch.cat(vectors)[None]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        everyone = [torch.empty_like(whole) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, whole, group=group)
        whole = torch.cat(everyone)
    parts = whole.cpu().split([len(vector) for vector in vectors], -1)
    return [Tally.of_vectors(rows, len(tally.maximum)) for rows, tally in zip(parts, tallies, strict=True)]


@dataclass(frozen=True)
class Scope:
    """Choice of what a monitor looks at, and how much of it.

    `layers` and `head_numbers` are those to watch, all if None; `per_head` logs every head by itself. `budget` bounds
    the logits computed per report and mode, by looking at a sample of the queries if need be, and `blocks` the memory
    held at once. Keys at a distance below `near` count as near. `weights` measures the heads' weights and their updates
    at each report, and keeps a copy of them for it.
    """

    layers: Iterable[int] | None = None
    head_numbers: Iterable[int] | None = None
    per_head: bool = False
    budget: float = 2**30
    near: int = NEAR
    blocks: Blocks | None = None
    weights: bool = True

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise refusal("a `budget` of at least 1", self.budget)


@dataclass
class LogitBudget:
    """`total` logits for all layers together; each pass of a layer may spend half of what the layer has left.

    A count and not a time, so that all processes thin alike and a run can be repeated.
    """

    total: float
    num_layers: int
    spent: Counter[Hashable] = field(default_factory=Counter)
    skipped: Counter[Hashable] = field(default_factory=Counter)

    def num_queries(
        self, layer: Hashable, shape: tuple[int, int, int, int], *, lookback: int | None, lookahead: int | None
    ) -> int:
        """Choose the number of queries of each text to look at; 0 to leave the pass alone.

        `shape`: texts, heads, queries, keys. A query that looks back only is counted with half of the keys, and with
        a window's at most.
        """
        num_texts, num_heads, num_queries, num_keys = shape
        seen = num_keys / 2 if lookahead == 0 else num_keys
        if lookback is not None:
            seen = min(seen, lookback + 1 + (num_keys if lookahead is None else lookahead))
        logits_per_query = num_texts * num_heads * max(1.0, seen)
        share = self.total / max(1, self.num_layers)
        left = share - self.spent[layer]
        if left < share * LEAST_SHARE:
            self.skipped[layer] += 1
            return 0
        wanted = min(num_queries, max(LEAST_QUERIES, int(left / 2 / logits_per_query)))
        self.spent[layer] += round(wanted * logits_per_query)
        return wanted
