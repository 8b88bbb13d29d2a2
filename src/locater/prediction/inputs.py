"""What the inputs of one layer are like, in moments: collected over the calibration windows in one pass.

Ordinary tokens have a mean, a covariance, lagged covariances and a mean by position; the first token, special tokens
and *echoes* of the first one are kept apart, because no Gaussian with one mean has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..attention.input_moments import InputMoments, MomentsCollector
from ..projections import widen
from .gaussian import Gaussian, of_tokens
from .settings import Terms

# Distances at which lagged covariances are collected; beyond the last they are taken to stay as they are.
LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Ordinary tokens are farther from the first token than their mean is: their own spread comes on top.
REACH = 0.8
# A kind this frequent is no rare one, and taking it out of the Gaussian does harm: then there are no echoes.
MOST_ECHOES = 0.1
# Tokens of one rare kind that are kept for its moments, which they have no more directions than.
MOST = 512


@dataclass(frozen=True, eq=False)
class Inputs:
    """The moments of one layer's inputs, for texts of one length.

    `alone` holds those of single positions (the first token's, special ones'), `echo` those of tokens that repeat the
    first one, `echo_rate` how often one stands at each position. `by_position` is the mean of the ordinary tokens that
    `counts` windows had at each position.
    """

    ordinary: InputMoments
    lagged: InputMoments | None
    alone: dict[int, Gaussian]
    echo: Gaussian | None
    echo_rate: Float[Tensor, " tokens"]
    by_position: Float[Tensor, "tokens d_model"]
    counts: Float[Tensor, " tokens"]

    @property
    def length(self) -> int:
        return len(self.counts)


def echoes(x: Float[Tensor, "batch tokens d_model"]) -> Bool[Tensor, "batch tokens"]:
    """Tokens nearer to their text's first token than 0.8 of its distance to the mean token; never the first itself."""
    first, rest = x[:, :1], x[:, 1:]
    reach = REACH * (rest.mean(1, keepdim=True) - first).norm(dim=-1)
    found = (x - first).norm(dim=-1) < reach
    found[:, 0] = False
    return found


class InputsCollector:
    """Sums over windows, one `add` per batch; memory O(d²), plus O(r²) for each lag and O(T d) for the positions.

    `rank` bounds the covariance's rank, `lag_rank` that of the lagged ones (a basis of principal directions).
    """

    def __init__(self, *, alone: Sequence[int], terms: Terms, rank: int | None, lag_rank: int | None, length: int):
        lags = [lag for lag in LAGS if lag < length - 1]
        self.ordinary = MomentsCollector(rank=rank)
        self.lagged = MomentsCollector(lags=lags, rank=lag_rank) if terms.lags else None
        self.alone: dict[int, list[Tensor]] = {position: [] for position in (alone if terms.first else ())}
        self.finds_echoes, self.echo = terms.echoes, []
        self.echo_counts, self.counts = torch.zeros(2, length)
        self.sums: Tensor | float = 0.0
        self.num_windows = 0

    @torch.no_grad()
    def add(self, x: Float[Tensor, "batch tokens d_model"]) -> None:
        """Take in the inputs of some windows."""
        x = widen(x).cpu()
        ordinary = torch.ones(x.shape[:2], dtype=torch.bool)
        for position, kept in self.alone.items():
            kept.append(x[: MOST - self.num_windows, position])
            ordinary[:, position] = False
        if self.finds_echoes:
            repeated = echoes(x) & ordinary
            if not self.num_windows and float(repeated.float().mean()) > MOST_ECHOES:
                self.finds_echoes, repeated = False, torch.zeros_like(repeated)
            ordinary &= ~repeated
            self.echo_counts += repeated.sum(0)
            self.echo.append(x[repeated][: MOST - sum(map(len, self.echo))])
        self.ordinary.add(x, valid=ordinary)
        if self.lagged is not None:
            self.lagged.add(x, valid=ordinary)
        self.sums += (x * ordinary[..., None]).sum(0)
        self.counts += ordinary.sum(0)
        self.num_windows += len(x)

    def inputs(self) -> Inputs:
        """What the sums say."""
        return Inputs(
            self.ordinary.moments(),
            self.lagged and self.lagged.moments(),
            {position: of_tokens(torch.cat(kept)) for position, kept in self.alone.items()},
            of_tokens(torch.cat(self.echo)) if bool(self.echo_counts.any()) else None,
            _smooth(self.echo_counts / self.num_windows),
            self.sums / self.counts.clamp(min=1)[:, None],
            self.counts,
        )


def _smooth(rate: Tensor) -> Tensor:
    """The mean over spans of positions that double: single positions are seen too rarely."""
    smoothed, start = rate.clone(), 1
    while start < len(rate):
        smoothed[start : 2 * start] = rate[start : 2 * start].mean()
        start *= 2
    return smoothed
