"""The expected logit over the distance, [m^T W(Δ) m + tr(W(Δ) Γ(Δ))]/λ, in closed form for linear heads."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention.moments import InputMoments
from ..heads import Head
from ..projections import Projection


def lag_shift(
    head: Head,
    lagged: InputMoments,
    sample: Float[Tensor, "tokens d_model"],
    *,
    length: int,
) -> Float[Tensor, " distances"]:
    """tr(W(Δ) Γ(Δ))/λ at the distances −(length − 1) … length − 1, with 0 at distance 0.

    A text of independent tokens lacks exactly this in the mean; at distance 0 it lacks nothing. Between the lags
    collected Γ is interpolated, beyond them it stays. Norms of queries and keys are taken at their slope over `sample`.
    """
    query, key = (effective(projection, sample) for projection in (head.query, head.key))
    lags = torch.tensor(lagged.lags)
    forward = torch.stack([lagged.between(query, key, lag) for lag in lagged.lags])
    backward = torch.stack([lagged.between(key, query, lag).mT for lag in lagged.lags])
    distances = torch.arange(length)
    ahead = rotated_trace(head, interpolate(forward, lags, distances), distances, length=length)
    behind = rotated_trace(head, interpolate(backward, lags, distances), -distances, length=length)
    ahead[0] = 0
    return torch.cat([behind[1:].flip(0), ahead]).float() * head.scale


def effective(projection: Projection, sample: Float[Tensor, "tokens d_model"]) -> Float[Tensor, "d_head d_model"]:
    """W itself, or for a normed projection its rows times the slope of the output on W x over the sample."""
    weight = projection.weight.double()
    if projection.is_linear:
        return weight
    plain, out = sample.double() @ weight.mT, projection(sample.float()).double()
    plain, out = plain - plain.mean(0), out - out.mean(0)
    slope = (plain * out).sum(0) / plain.square().sum(0).clamp(min=1e-30)
    return weight * slope[:, None]


def rotated_trace(
    head: Head, products: Float[Tensor, "distances d_head d_head"], distances: Int[Tensor, " distances"], *, length: int
) -> Float[Tensor, " distances"]:
    """E (R_Δ q)·k for products E q k^T at each distance."""
    if head.rotary is None:
        return products.diagonal(dim1=-2, dim2=-1).sum(-1)
    by_key = products.permute(2, 0, 1)  # for each row of the key, a query vector at every distance
    turned = head.rotary.rotate(by_key, distances, length=length) * head.rotary.amplitude
    still = _still_rows(head)
    turned[..., still] = by_key[..., still]
    return turned.permute(1, 2, 0).diagonal(dim1=-2, dim2=-1).sum(-1)


def _still_rows(head: Head) -> Tensor:
    """Rows of the head that do not turn, which the amplitude does not touch either."""
    assert head.rotary is not None
    still = torch.ones(head.d_head, dtype=torch.bool)
    still[head.rotary.pairs.flatten()] = False
    return still


def interpolate(
    values: Float[Tensor, "lags *shape"], lags: Int[Tensor, " lags"], at: Int[Tensor, " distances"]
) -> Float[Tensor, "distances *shape"]:
    """Linear between the lags, constant beyond the last."""
    upper = torch.searchsorted(lags, at).clamp(max=len(lags) - 1)
    lower = (upper - 1).clamp(min=0)
    share = ((at - lags[lower]) / (lags[upper] - lags[lower]).clamp(min=1)).clamp(0, 1).to(values)
    share = share.reshape(-1, *(1,) * (values.dim() - 1))
    return values[lower] * (1 - share) + values[upper] * share
