"""Similarity of the tokens of a text: measures of the rank of their representations X (tokens × d)."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..projections import widen


@dataclass(frozen=True)
class Rank:
    """Four views of rank collapse, one number per text; NaN where a text has too few tokens, or is not finite.

    Residual 0, cosine 1, ranks 1: all tokens are alike.
    """

    residual: Float[Tensor, " batch"]  # ‖X − 1x̄^T‖_F / ‖X‖_F
    mean_cosine: Float[Tensor, " batch"]  # over all pairs of different tokens
    stable_rank: Float[Tensor, " batch"]  # ‖X‖_F² / ‖X‖₂²
    effective_rank: Float[Tensor, " batch"]  # exp of the entropy of the normalised singular values


def residual(
    x: Float[Tensor, "*batch tokens d_model"], valid: Bool[Tensor, "*batch tokens"] | None = None
) -> Float[Tensor, "*batch"]:
    """‖X − 1x̄^T‖_F / ‖X‖_F over the valid tokens: 0 when all are alike."""
    if valid is None:
        centred = x - x.mean(-2, keepdim=True)
    else:
        x = x * valid[..., None]
        centred = (x - (x.sum(-2) / valid.sum(-1, keepdim=True))[..., None, :]) * valid[..., None]
    return torch.linalg.matrix_norm(centred) / torch.linalg.matrix_norm(x)


def rank(
    x: Float[Tensor, "batch tokens d_model"], *, valid: Bool[Tensor, "batch tokens"] | None = None, most: int = 128
) -> Rank:
    """Residual and cosine over all valid tokens, O(T d); the ranks over at most `most` of them, evenly spaced.

    One token is like all others and has none of these: NaN (a step of generation is no collapse). Ranks are bounded by
    the number of tokens they are taken over: compare them at one `most` only. Their cost is one
    eigenvalue problem of that size per text; singular values below √ε of the largest are lost in it.
    """
    x = widen(x)
    valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if valid is None else valid
    x = x * valid[..., None]
    count = valid.sum(-1)
    directions = torch.nn.functional.normalize(x, dim=-1)
    pairs = directions.sum(-2).square().sum(-1) - directions.square().sum((-2, -1))
    singular = singular_values(_thinned(x, valid, most))
    share = singular / singular.sum(-1, keepdim=True)
    several = count > 1
    return Rank(
        residual=residual(x, valid).where(several, torch.nan),
        mean_cosine=(pairs / (count * (count - 1))).where(several, torch.nan),
        stable_rank=(singular.square().sum(-1) / singular.square().amax(-1)).to(x).where(several, torch.nan),
        effective_rank=torch.special.entr(share).sum(-1).exp().to(x).where(several, torch.nan),
    )


def singular_values(x: Float[Tensor, "batch tokens d_model"]) -> Float[Tensor, "batch least"]:
    """Through the smaller Gram matrix, in float64."""
    x = x.double()
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    # The solver raises an error on what is not finite, and who watches an exploding run wants to go on watching.
    finite = gram.isfinite().all(-1).all(-1)[..., None]
    return torch.linalg.eigvalsh(gram.where(finite[..., None], 0.0)).clamp(min=0).sqrt().where(finite, torch.nan)


def _thinned(x: Tensor, valid: Tensor, most: int) -> Tensor:
    """At most that many rows: the valid ones first in order, then evenly spaced; padding adds only zeros."""
    count = int(valid.sum(-1).max())
    order = torch.sort(valid.int(), dim=-1, descending=True, stable=True).indices[:, :count]
    if count <= most:
        return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))
    # Spaced within each text's own valid tokens; a text shorter than that keeps all of its own, and zeros.
    every, number = torch.arange(most, device=x.device), valid.sum(-1, keepdim=True)
    steps = (every * number // most).where(number > most, every)
    return x.gather(1, order.gather(1, steps)[..., None].expand(-1, -1, x.shape[-1]))
