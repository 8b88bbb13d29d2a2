"""Statistics of one layer's inputs, kept from one pass over the calibration windows.

Some of the windows as they are, for single tokens at their positions; and lagged covariances over all windows, for what
tokens of one window have to do with each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..attention.input_moments import InputMoments, MomentsCollector
from ..projections import widen
from .settings import Terms
from .windows import spread

# Distances at which lagged covariances are collected; beyond the last they are taken to stay as they are.
LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Tokens of a layer that are kept: memory grows neither with the text nor, down to a few windows, with their length.
MOST_TOKENS = 8192
FEWEST_WINDOWS = 4


@dataclass(frozen=True, eq=False)
class Inputs:
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
    return spread(total, min(total, texts, max(FEWEST_WINDOWS, MOST_TOKENS // length)))


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

    def inputs(self) -> Inputs:
        """Inputs computed from the sums."""
        windows = torch.cat(self.windows)
        lagged = None if self.lagged is None else self.lagged.moments()
        if lagged is not None and self.terms.positions:
            lagged = beyond_positions(lagged, self.sums / self.num_windows, self.ordinary)
            # Means over all W windows have both tokens of one window once in W, a draw of k windows once in k.
            share = (1 - 1 / len(windows)) * self.num_windows / max(self.num_windows - 1, 1)
            lagged = replace(lagged, core=lagged.core * share)
        return Inputs(windows, self.alone, lagged)


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
