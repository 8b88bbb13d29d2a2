"""ρ_t by simulating the random walk, independent of every formula; and the theory's softmax against the true one."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..spectra import Covariance
from .random_walk import Estimate, Problem, Turns, logits, prepare


def profile(
    query: Float[Tensor, "*#batch d_head d_model"],
    key: Float[Tensor, "*#batch d_head d_model"],
    *,
    length: int,
    num_walks: int,
    generator: torch.Generator,
    temperature: float | None = None,
    covariance: Covariance = 1.0,
    turns: Turns | None = None,
) -> Estimate:
    """The share of walks on which token t is on the sloped piece, with its binomial standard error √(ρ(1−ρ)/n).

    Cost num_walks·T·min(d, 2d_h) normal variates per head, in bounded memory. The standard error is 0 where all walks
    agree, which is then no bound: ρ may still be about 3/n away.
    """
    problem = prepare(query, key, length=length, temperature=temperature, covariance=covariance)
    shares = []
    for head in problem.heads():
        parts = logits(head, turns, num_walks=num_walks, generator=generator)
        shares.append(sum(on_slope(part, temperature=head.temperature).sum(0) for part in parts) / num_walks)
    mean = torch.stack(shares).reshape(*problem.batch, length).double()
    return Estimate(mean, (mean * (1 - mean) / num_walks).sqrt())


def clipped_linear(logits: Float[Tensor, "*batch length"]) -> Float[Tensor, "*batch length"]:
    """S(ω)_t = clip((1 + ω_t − ω̄)/T, 0, 1), the first-order expansion of softmax at ω = 0.

    Sums to 1 where nothing is clipped, and to at least 1 anywhere: the unclipped values sum to 1, cutting the
    negative ones adds to that, and a value cut at the top leaves a whole 1.

    >>> clipped_linear(torch.tensor([1.0, 0.0, -1.0, 0.0]))
    tensor([0.5000, 0.2500, 0.0000, 0.2500])
    """
    return ((1 + logits - logits.mean(-1, keepdim=True)) / logits.shape[-1]).clamp(0, 1)


def on_slope(logits: Float[Tensor, "*batch length"], *, temperature: float = 1.0) -> Bool[Tensor, "*batch length"]:
    """Tell whether token t is on the sloped piece, 0 < (1 + ω_t − ω̄)/T < 1, of logits still to be divided by λ.

    Compared as −λ < λ(ω_t − ω̄) < (T−1)λ, so that no λ is too small to divide by.
    """
    deviation = (logits - logits.mean(-1, keepdim=True)).double()
    return (deviation > -temperature) & (deviation < (logits.shape[-1] - 1) * temperature)


def clipping_error(
    query: Float[Tensor, "*#batch d_head d_model"],
    key: Float[Tensor, "*#batch d_head d_model"],
    *,
    length: int,
    num_walks: int,
    generator: torch.Generator,
    temperature: float | None = None,
    covariance: Covariance = 1.0,
) -> Estimate:
    """Total variation ½ Σ_t |softmax(ω)_t − S(ω)_t/ΣS| of every head, averaged over random walks.

    0 when the logits vanish; near 1 when the two put their mass on different tokens. It says where ρ_t describes a
    real attention layer and where it is a caricature.
    """
    problem = prepare(query, key, length=length, temperature=temperature, covariance=covariance)
    distances_of_heads = [_distances(head, num_walks=num_walks, generator=generator) for head in problem.heads()]
    distances = torch.stack(distances_of_heads).reshape(*problem.batch, num_walks)
    return Estimate(distances.mean(-1), distances.std(-1, correction=0) / num_walks**0.5)


def _distances(head: Problem, *, num_walks: int, generator: torch.Generator) -> Float[Tensor, " {num_walks}"]:
    parts = []
    for raw in logits(head, num_walks=num_walks, generator=generator):
        # Both softmaxes see differences only, so the largest may be 0; what lies far below it is 0 to both.
        scaled = ((raw - raw.amax(-1, keepdim=True)).double() / head.temperature).clamp_min(-1e100)
        linear = clipped_linear(scaled)
        parts.append((scaled.softmax(-1) - linear / linear.sum(-1, keepdim=True)).abs().sum(-1) / 2)
    return torch.cat(parts)
