"""Norms behind a projection (QK-norm, the inner norm of latent attention) as factors of its rows.

The slow way is `Projection.linearised`, which reads what all heads share anew for every head.
"""

import torch
from torch import Tensor

from ..projections import Norm, Projection, widen

ROWS_AT_ONCE = 256


class Linear:
    """norm(W x) as a matrix, its divisor taken at its root mean square over white x.

    What a norm over all heads needs of the whole projection, or an inner norm of the down projection, is summed once.
    """

    def __init__(self, *, raw: bool) -> None:
        self.raw = raw
        self.sums: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def apply(self, rows: Tensor, projection: Projection) -> None:
        """Change the folded rows (d_h, d) of the projection in place."""
        low_rank, norm = projection.low_rank, projection.norm
        if low_rank is not None and low_rank.norm is not None:
            inner = low_rank.norm
            if inner.kind == "layer":  # the mean is taken inside, between down and up
                rows.copy_((projection if self.raw else projection.folded()).linearised().detach())
                return
            _, square = self._shared(low_rank.down, projection)
            rows[: len(low_rank.up)] *= _factor(inner, square, len(low_rank.down))
        if norm is not None:
            self._outer(rows, norm, projection)

    def _outer(self, rows: Tensor, norm: Norm, projection: Projection) -> None:
        if projection.whole is None:
            centre, square, count = rows.mean(0), rows.square().sum(), len(rows)
        else:
            centre, square = self._shared(projection.whole.weight, projection)
            count = len(projection.whole.weight)
        if norm.kind == "layer":
            rows -= centre
            square = square - count * centre.square().sum()
        rows *= _factor(norm, square, count)
        if norm.gain is not None:
            rows *= norm.gain.detach().to(rows)[:, None]

    def _shared(self, weight: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """The mean row of a folded weight, and the sum of its squares."""
        if id(weight) not in self.sums:
            self.sums[id(weight)] = weight, *_column_sums(weight)  # held, so that no other weight takes its id
        _, totals, squares = self.sums[id(weight)]
        norm = None if self.raw else projection.input_norm
        gain = torch.ones_like(totals) if norm is None or norm.gain is None else norm.gain.detach().to(totals)
        return totals * gain / len(weight), (squares * gain.square()).sum()


def _column_sums(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and sums of squares down the columns, some rows at a time."""
    totals = torch.zeros_like(widen(weight[0].detach()))
    squares = torch.zeros_like(totals)
    for block in weight.detach().split(ROWS_AT_ONCE):
        totals += widen(block).sum(0)
        squares += widen(block).square().sum(0)
    return totals, squares


def _factor(norm: Norm, square: Tensor, count: int) -> Tensor:
    return (square / (1 if norm.kind == "l2" else count) + norm.epsilon).rsqrt()
