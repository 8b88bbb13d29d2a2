"""Logits of a head on simulated random-walk tokens: what the Monte Carlo methods share."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from .problem import Problem

# Largest number of normal variates held at once.
VARIATES_AT_ONCE = 2**22


class Estimate(NamedTuple):
    """A mean over random walks and its standard error."""

    mean: Float[Tensor, "*shape"]
    standard_error: Float[Tensor, "*shape"]


def logits(
    head: Problem, *, num_walks: int, generator: torch.Generator
) -> Iterator[Float[Tensor, "walks {head.length}"]]:
    """λ·ω_t = x_t^T W x_T of independent walks, some walks at a time, num_walks in all.

    The tokens x_t are never stored: the increments of the logit are ε_s·(W x_T), so the steps suffice. Refuses
    weights whose logits overflow.
    """
    query, key = reduced(head.query, head.key)
    for steps in normal_steps(num_walks, (head.length, query.shape[-1]), like=query, generator=generator):
        direction = steps.sum(1) @ query.mT @ key
        found = (steps @ direction[..., None])[..., 0].cumsum(-1)
        if not bool(torch.isfinite(found).all()):
            raise refusal("weights whose logits are finite", "an overflow", "scale the weights down or use float64")
        yield found


def normal_steps(
    num_walks: int, shape: tuple[int, int], *, like: Tensor, generator: torch.Generator
) -> Iterator[Float[Tensor, "walks length d_model"]]:
    """Standard normal steps in blocks of bounded memory."""
    if num_walks < 1:
        raise refusal("at least one walk", num_walks)
    at_once = max(1, VARIATES_AT_ONCE // (shape[0] * shape[1]))
    for start in range(0, num_walks, at_once):
        walks = min(at_once, num_walks - start)
        yield torch.randn(walks, *shape, generator=generator, dtype=like.dtype, device=like.device)


def reduced(
    query: Float[Tensor, "d_head d_model"], key: Float[Tensor, "d_head d_model"]
) -> tuple[Float[Tensor, "d_head span"], Float[Tensor, "d_head span"]]:
    """The weights in an orthonormal basis of all their rows: standard normal steps stay standard normal there."""
    if query.shape[-1] <= 2 * query.shape[-2]:
        return query, key
    basis = torch.linalg.qr(torch.cat([query, key]).mT).Q
    return query @ basis, key @ basis
