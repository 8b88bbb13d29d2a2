"""Mean, covariance and lagged covariances of layer inputs, in one pass over texts.

Cost: one d×d product per lag and token, memory O(d²) per lag; with a rank r instead of d, O(r²) and a basis.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import missing, refusal
from ..projections import widen


@dataclass(frozen=True, eq=False)
class InputMoments:
    """m = E x_t and Γ(Δ) = E (x_t − m)(x_{t−Δ} − m)^T; Γ(0) is the covariance.

    With a `basis` B (d×r), Γ(Δ) = B core B^T, and to Γ(0) comes the diagonal `residual`, the variance outside B.
    `counts` says over how many pairs of tokens each lag's mean runs.
    """

    lags: tuple[int, ...]
    counts: tuple[int, ...]
    mean: Float[Tensor, " d_model"]
    core: Float[Tensor, "lags rank rank"]
    basis: Float[Tensor, "d_model rank"] | None = None
    residual: Float[Tensor, " d_model"] | None = None

    def lagged(self, lag: int = 0) -> Float[Tensor, "d_model d_model"]:
        """Γ(Δ): rows are the later token (the query), columns the earlier (the key)."""
        core = self.core[self._index(lag)]
        if self.basis is None or self.residual is None:
            return core
        dense = self.basis @ core @ self.basis.mT
        return dense + torch.diag(self.residual) if lag == 0 else dense

    def between(
        self, query: Float[Tensor, "queries d_model"], key: Float[Tensor, "keys d_model"], lag: int
    ) -> Float[Tensor, "queries keys"]:
        """W_Q Γ(Δ) W_K^T: the covariance of query rows with the key rows Δ tokens before, in float64."""
        query, key, core = query.to(self.mean.dtype), key.to(self.mean.dtype), self.core[self._index(lag)]
        if self.basis is None or self.residual is None:
            return query @ core @ key.mT
        form = (query @ self.basis) @ core @ (key @ self.basis).mT
        return form + (query * self.residual) @ key.mT if lag == 0 else form

    def _index(self, lag: int) -> int:
        if lag not in self.lags:
            raise refusal(f"a lag among {', '.join(map(str, self.lags))}", lag, "collect the moments with that lag")
        return self.lags.index(lag)


class MomentsCollector:
    """Sums over texts, one `add` per batch of one layer's inputs; `moments()` at any time.

    The first batch fixes the shift that keeps the sums small and, with `rank`, the basis: its principal directions,
    so it must hold more tokens than that. `skip` leaves out that many tokens at the start of each text.
    """

    def __init__(self, *, lags: Sequence[int] = (), rank: int | None = None, skip: int = 0):
        if any(lag < 0 for lag in lags) or skip < 0:
            raise refusal("lags and a number of skipped tokens of at least 0", f"{list(lags)} and {skip}")
        self.lags = tuple(sorted({0, *lags}))
        self.rank, self.skip = rank, skip
        self.shift: Tensor | None = None
        self.basis: Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        x: Float[Tensor, "batch tokens d_model"],
        *,
        valid: Bool[Tensor, "batch tokens"] | None = None,
    ) -> None:
        """Take in one batch; tokens that are not valid are left out."""
        x = widen(x)[:, self.skip :]
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid[:, self.skip :]
        if self.shift is None:
            self._begin(x, valid)
        assert self.shift is not None
        x = (x - self.shift) * valid[..., None]
        inside = x if self.basis is None else x @ self.basis
        self.total += x.sum((0, 1)).double()
        if self.basis is not None:
            self.outside += (x - inside @ self.basis.mT).square().sum((0, 1)).double()
        for index, lag in enumerate(self.lags):
            self._add_pairs(index, lag, inside, valid)

    def _begin(self, x: Tensor, valid: Tensor) -> None:
        tokens = x[valid]
        if not len(tokens):
            raise missing("at least one valid token in the first batch")
        self.shift = tokens.mean(0)
        if self.rank is not None and self.rank < x.shape[-1]:
            if len(tokens) <= self.rank:
                raise refusal(f"a first batch of more than {self.rank} tokens", len(tokens), "or take a lower rank")
            self.basis = torch.linalg.svd(tokens - self.shift, full_matrices=False).Vh[: self.rank].mT.contiguous()
        d_model, size = x.shape[-1], x.shape[-1] if self.basis is None else self.basis.shape[1]
        self.total = x.new_zeros(d_model, dtype=torch.float64)
        self.outside = torch.zeros_like(self.total)
        self.products = x.new_zeros(len(self.lags), size, size)
        self.later, self.earlier = x.new_zeros(2, len(self.lags), size, dtype=torch.float64)
        self.counts = torch.zeros(len(self.lags), dtype=torch.long, device=x.device)

    def _add_pairs(self, index: int, lag: int, x: Tensor, valid: Tensor) -> None:
        length = x.shape[1] - lag
        if length <= 0:
            return
        later, earlier = x[:, lag:], x[:, :length]
        paired = valid[:, lag:] & valid[:, :length]
        if not bool(paired.all()):
            later, earlier = later * paired[..., None], earlier * paired[..., None]
        self.products[index] += later.flatten(0, 1).mT @ earlier.flatten(0, 1)
        self.later[index] += later.sum((0, 1)).double()
        self.earlier[index] += earlier.sum((0, 1)).double()
        self.counts[index] += paired.sum()

    def moments(self) -> InputMoments:
        """Moments from the sums, in float64."""
        if self.shift is None or not bool((self.counts > 0).all()):
            longest = max(self.lags) + self.skip
            raise missing(f"texts of more than {longest} tokens", "add some, or take shorter lags")
        mean = self.total / self.counts[0]
        inside = mean if self.basis is None else mean @ self.basis.double()
        counts = self.counts[:, None]
        later, earlier = self.later / counts, self.earlier / counts
        core = self.products.double() / counts[..., None]
        core = core - later[:, :, None] * inside - inside[:, None] * earlier[:, None, :] + inside[:, None] * inside
        whole = self.shift.double() + mean
        if self.basis is None:
            return InputMoments(self.lags, tuple(self.counts.tolist()), whole, core)
        basis = self.basis.double()
        residual = self.outside / self.counts[0] - (mean - inside @ basis.mT).square()
        return InputMoments(self.lags, tuple(self.counts.tolist()), whole, core, basis, residual.clamp(min=0))
