"""ρ_t by simulating the random walk: slow, and independent of every formula."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..spectra import Covariance
from . import random_walk
from .clipped_softmax import on_slope
from .random_walk import Estimate, Problem, prepare


def profile(
    query: Float[Tensor, "*#batch d_head d_model"],
    key: Float[Tensor, "*#batch d_head d_model"],
    *,
    length: int,
    num_walks: int,
    generator: torch.Generator,
    temperature: float | None = None,
    covariance: Covariance = 1.0,
) -> Estimate:
    """The share of walks on which token t is on the sloped piece, with its binomial standard error √(ρ(1−ρ)/n).

    Cost num_walks·T·min(d, 2d_h) normal variates per head, in bounded memory. The standard error is 0 where all walks
    agree, which is then no bound: ρ may still be about 3/n away.
    """
    problem = prepare(query, key, length=length, temperature=temperature, covariance=covariance)
    shares = [_share(head, num_walks=num_walks, generator=generator) for head in problem.heads()]
    return binomial(torch.stack(shares).reshape(*problem.batch, length), num_walks)


def binomial(mean: Float[Tensor, "*shape"], num_walks: int) -> Estimate:
    """The estimate of a probability from the share of independent walks."""
    return Estimate(mean, (mean * (1 - mean) / num_walks).sqrt())


def _share(head: Problem, *, num_walks: int, generator: torch.Generator) -> Float[Tensor, " {head.length}"]:
    count = torch.zeros(head.length, dtype=torch.float64, device=head.query.device)
    for logits in random_walk.logits(head, num_walks=num_walks, generator=generator):
        count += on_slope(logits, temperature=head.temperature).sum(0)
    return count / num_walks
