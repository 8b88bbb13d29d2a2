"""Mimetic initialisation: queries and keys whose product looks like a trained one's (Trockman & Kolter 2023).

"Mimetic Initialization of Self-Attention Layers", arXiv 2305.09828.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...models.live.explicit import Explicit
from ..base import Stabiliser, non_negative
from ..live.pairs import find_pairs
from ..live.sharding import part_of


class MimeticInitialisation(Stabiliser):
    """W ≈ noise·Z + identity·I with Z ~ N(0, 1/d), cut to rank d_h by SVD; acts once, when made.

    With `values=[(value, output), …]` also output·value ≈ noise·Z − identity·I at the paper's 0.4. Keys of a group come
    from the mean of its heads' matrices, queries by least squares. Cost: one d×d SVD per key head.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        identity: float = 0.7,
        noise: float = 0.7,
        heads: Sequence[Explicit] = (),
        values: Sequence[tuple[nn.Linear, nn.Linear]] = (),
        generator: torch.Generator | None = None,
    ) -> None:
        identity, noise = non_negative(identity, "identity"), non_negative(noise, "noise")
        with torch.no_grad():
            for pair in find_pairs(model, heads=heads):
                part = part_of(pair, pair.weights())
                for query, key in zip(part.query, part.key[:, 0], strict=True):
                    wanted = noisy_identity(len(query), query.shape[-1], identity, noise, generator).to(query)
                    fresh = factors(wanted, query.shape[-2])
                    query.copy_(fresh[0])
                    key.copy_(fresh[1])
                part.commit()
            for value, output in values:
                wanted = noisy_identity(1, value.in_features, -0.4, 0.4, generator).to(value.weight)
                inner, outer = factors(wanted, value.out_features)
                value.weight.copy_(inner[0])
                output.weight.copy_(outer.mT)


def noisy_identity(
    count: int, size: int, identity: float, noise: float, generator: torch.Generator | None = None
) -> Float[Tensor, "count size size"]:
    """noise·Z + identity·I, Z of variance 1/size."""
    normal = torch.randn(count, size, size, generator=generator) / size**0.5
    return noise * normal + identity * torch.eye(size)


def factors(
    wanted: Float[Tensor, "heads d_model d_model"], rank: int
) -> tuple[Float[Tensor, "heads rank d_model"], Float[Tensor, "rank d_model"]]:
    """Q_h and one K with K^T Q_h nearest to each wanted matrix, for the K of their mean's best rank-r factors."""
    left, values, _ = torch.linalg.svd(wanted.mean(0), full_matrices=False)
    root = values[:rank].sqrt()
    key = (left[:, :rank] * root).mT
    # K K^T is diag(root²), so the least-squares query is its inverse times K W.
    return (key @ wanted) / root[:, None].square(), key
