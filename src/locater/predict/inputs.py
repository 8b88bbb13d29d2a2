"""What the inputs of one layer are like, in moments: collected over the calibration windows in one pass.

Ordinary tokens have a mean, a covariance, lagged covariances and a mean by position; the first token, special tokens
and *echoes* of the first one are kept apart, because no Gaussian with one mean has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..attention.moments import InputMoments, MomentsCollector
from ..projections import widen
from .terms import Terms

# Distances at which lagged covariances are collected, beyond which they are taken to stay as they are.
LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The moments of one layer's inputs, for texts of `length` tokens.

    `alone` holds the moments of single positions (the first token's, special ones'), `echo` those of the tokens that
    repeat the first one, `echo_rate` how often one stands at each position. `lagged` has the lags of ordinary tokens.
    """

    length: int
    ordinary: InputMoments
    lagged: InputMoments | None
    alone: dict[int, InputMoments]
    echo: InputMoments | None
    echo_rate: Float[Tensor, " tokens"]
    position_sums: Float[Tensor, "tokens d_model"]
    position_counts: Float[Tensor, " tokens"]


def echoes(x: Float[Tensor, "batch tokens d_model"]) -> Bool[Tensor, "batch tokens"]:
    """Tokens whose distance to the window's first token is below half that of the window's mean; never the first."""
    first, rest = x[:, :1], x[:, 1:]
    reach = (rest.mean(1, keepdim=True) - first).norm(dim=-1) / 2
    found = (x - first).norm(dim=-1) < reach
    found[:, 0] = False
    return found


class InputsCollector:
    """Sums over windows, one `add` per batch; memory O(d²), plus O(r²) for each lag and O(T d) for the positions.

    `rank` bounds the covariance's rank, `lag_rank` that of the lagged ones (a basis of principal directions).
    """

    def __init__(self, *, alone: Sequence[int], terms: Terms, rank: int | None, lag_rank: int | None, length: int):
        self.terms, self.length = terms, length
        self.ordinary = MomentsCollector(rank=rank)
        lags = [lag for lag in LAGS if lag < length - 1]
        self.lagged = MomentsCollector(lags=lags, rank=lag_rank) if terms.lags else None
        self.alone = {position: MomentsCollector() for position in (alone if terms.first else ())}
        self.echo = MomentsCollector() if terms.echoes else None
        self.echo_counts = torch.zeros(length)
        self.num_windows = 0
        self.position_sums: Tensor | None = None
        self.position_counts = torch.zeros(length)

    @torch.no_grad()
    def add(self, x: Float[Tensor, "batch tokens d_model"]) -> None:
        x = widen(x).cpu()
        ordinary = torch.ones(x.shape[:2], dtype=torch.bool)
        for position, collector in self.alone.items():
            collector.add(x[:, [position]])
            ordinary[:, position] = False
        if self.echo is not None:
            repeated = echoes(x) & ordinary
            ordinary &= ~repeated
            self.echo_counts += repeated.sum(0)
            if bool(repeated.any()):
                self.echo.add(x, valid=repeated)
        self.ordinary.add(x, valid=ordinary)
        if self.lagged is not None:
            self.lagged.add(x, valid=ordinary)
        self.position_sums = x.new_zeros(x.shape[1:]) if self.position_sums is None else self.position_sums
        self.position_sums += (x * ordinary[..., None]).sum(0)
        self.position_counts += ordinary.sum(0)
        self.num_windows += len(x)

    def inputs(self) -> Inputs:
        assert self.position_sums is not None, "no window was added"
        return Inputs(
            self.length,
            self.ordinary.moments(),
            self.lagged and self.lagged.moments(),
            {position: collector.moments() for position, collector in self.alone.items()},
            self.echo.moments() if self.echo is not None and bool(self.echo_counts.any()) else None,
            _smooth(self.echo_counts / self.num_windows),
            self.position_sums,
            self.position_counts,
        )


def _smooth(rate: Tensor) -> Tensor:
    """The mean over spans of positions that double: single positions are seen too rarely."""
    smoothed, start = rate.clone(), 1
    while start < len(rate):
        smoothed[start : 2 * start] = rate[start : 2 * start].mean()
        start *= 2
    return smoothed
