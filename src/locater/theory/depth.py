"""Entropy and rank through any number of attention layers: a recursion on the T×T kernel of the tokens.

Weights W that are not aligned with the tokens X (T×d) act on them through the kernel K = XX^T/d alone. With τ = tr W/λ,
δ = ‖W − (tr W/d)·1‖_F/λ and σ = the symmetry of that rest, the logits of a query t for the keys s are Gaussian:

    Ω = τR + δ L G L^T,   R = LL^T,   E G_ij² = 1 off the diagonal,   E G_ij G_ji = σ

for R = K, or behind a norm R_st = K_st/√(K_ss K_tt). Attention P = softmax_{s ≤ t}(Ω) then makes of the kernel

    K ← P K P^T,   and with a residual stream and norms   K ← K + C + C^T + P R P^T,   C_ts = Σ_u P_tu K_us/√K_uu.

Nothing is fitted and no matrix is as wide as the model. Values, feed-forward parts and several heads are left out.
The limit is in the first sentence: training aligns W with its inputs, and then the recursion errs (docs/theory.md).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention import statistics
from ..errors import refusal
from ..spectra import Moments
from .random_walk import VARIATES_AT_ONCE, Estimate, check_length, check_temperature

# A negative eigenvalue of a kernel is rounding up to this share of the largest.
ROUNDING = 1e-12


class AttentionLayer(NamedTuple):
    """One layer as the recursion sees it: the spectrum of W in units of λ, and what stands around the attention."""

    trace: float  # τ = tr W/λ
    deviation: float  # δ = ‖W − (tr W/d)·1‖_F/λ; for a symmetric W this is √d·(deviation of the eigenvalues)/λ
    symmetry: float = 1.0  # σ of W − (tr W/d)·1, from −1 to 1
    norm: bool = False  # x ← x + P norm(x); without it x ← P x
    sink: float = 0.0  # what every query adds to the logit of the first token
    causal: bool = True  # whether keys s > t are hidden


class Propagation(NamedTuple):
    """The state of every layer, with standard errors over the draws of G."""

    entropy: Estimate  # of attention, −Σ p log p / log n, over the queries with n ≥ 2 keys
    residual: Estimate  # behind the layer, ‖X − 1x̄^T‖_F/‖X‖_F over that of the tokens at the start; 0: all are alike


def layer_of_moments(
    spectrum: Moments, *, temperature: float | None = None, norm: bool = False, sink: float = 0.0
) -> AttentionLayer:
    """Read τ, δ and σ off the moments of one head; λ is √d_h unless given.

    δ² = (‖W‖² − (tr W)²/d)/λ² and σ = (tr W² − (tr W)²/d)/(‖W‖² − (tr W)²/d).
    """
    scale = check_temperature(temperature, spectrum.d_head)
    shared = float(spectrum.trace) ** 2 / spectrum.d_model
    rest = max(float(spectrum.frobenius_squared) - shared, 0.0)
    symmetry = (float(spectrum.trace_of_square) - shared) / rest if rest else 1.0
    return AttentionLayer(
        float(spectrum.trace) / scale, math.sqrt(rest) / scale, max(-1.0, min(1.0, symmetry)), norm=norm, sink=sink
    )


def walk_kernel(length: int) -> Float[Tensor, "{length} {length}"]:
    """Return K_st = min(s, t), the kernel of a wide Gaussian random walk with steps of unit variance."""
    positions = torch.arange(1, check_length(length) + 1, dtype=torch.float64)
    return torch.minimum(positions[:, None], positions)


def token_kernel(tokens: Float[Tensor, "*batch length d_model"]) -> Float[Tensor, "*batch length length"]:
    """Return K = XX^T/d of measured tokens."""
    wide = tokens.double()
    return wide @ wide.mT / tokens.shape[-1]


def rank_residual(kernel: Float[Tensor, "*batch length length"]) -> Float[Tensor, "*batch"]:
    """Return ‖X − 1x̄^T‖_F/‖X‖_F = √(1 − ΣK/(T tr K)).

    >>> rank_residual(torch.ones(3, 3)), rank_residual(torch.eye(4)).square()
    (tensor(0.), tensor(0.7500))
    """
    trace = kernel.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (1 - kernel.sum((-2, -1)) / (kernel.shape[-1] * trace)).clamp_min(0).sqrt()


def propagate(
    kernel: Float[Tensor, "*batch length length"],
    layers: Sequence[AttentionLayer],
    *,
    num_draws: int,
    generator: torch.Generator,
) -> Propagation:
    """Follow a kernel through the layers, `num_draws` times for each kernel of a batch; tensors are by layer.

    Cost 8T³ multiplications per layer and draw, whatever the width d; memory is bounded. In attention alone the
    residual differs much from draw to draw (by 0.3 where δ ≥ 1), so a single model may be far from the mean.
    """
    _check(kernel, layers, num_draws)
    factors = factor(kernel).flatten(0, -3) if kernel.dim() > 2 else factor(kernel)[None]
    start = rank_residual(factors @ factors.mT).mean()
    if not start > math.sqrt(ROUNDING):
        raise refusal("tokens that differ from each other", "a kernel of tokens that are all alike")
    parts = [_follow(part, layers, generator) for part in _repeat(factors, num_draws)]
    entropy, residual = (torch.cat(some, dim=-1) for some in zip(*parts, strict=True))
    return Propagation(_estimate(entropy), _estimate(residual / start))


def factor(kernel: Float[Tensor, "*batch length length"]) -> Float[Tensor, "*batch length length"]:
    """Return L with LL^T = K: tokens of width T that have this kernel."""
    values, vectors = torch.linalg.eigh(kernel.double())
    if bool((values[..., 0] < -ROUNDING * values[..., -1].clamp_min(0)).any()):
        raise refusal("a kernel without negative eigenvalues", float(values.min()), "use XX^T/d of some tokens")
    return vectors * values.clamp_min(0).sqrt()[..., None, :]


def step(
    factors: Float[Tensor, "draws length width"], layer: AttentionLayer, generator: torch.Generator
) -> tuple[Float[Tensor, "draws length length"], Float[Tensor, "draws length width"]]:
    """Return the attention P of one layer, and the factors behind it.

    K is kept as LL^T: the law of G does not change under rotations of L, so L ← PL (or L + P norm(L)) is the recursion
    of K without a decomposition in each layer. It says that a layer of any width acts on T tokens as one of width T.
    """
    read = torch.nn.functional.normalize(factors, dim=-1) if layer.norm else factors
    matrix = layer.deviation * _gaussian(factors, layer.symmetry, generator)
    matrix.diagonal(dim1=-2, dim2=-1).add_(layer.trace)
    logits = read @ matrix @ read.mT
    logits[..., 0] += layer.sink
    if layer.causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
    attention = logits.softmax(-1)
    passed = attention @ read
    return attention, factors + passed if layer.norm else passed


def _gaussian(like: Tensor, symmetry: float, generator: torch.Generator) -> Float[Tensor, "draws width width"]:
    """Draw √((1+σ)/2) (H + H^T)/√2 + √((1−σ)/2) (H − H^T)/√2 for a Gaussian H, two parts that are independent."""
    shape = (len(like), like.shape[-1], like.shape[-1])
    normal = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
    same, turned = math.sqrt(1 + symmetry) / 2, math.sqrt(1 - symmetry) / 2
    return (same + turned) * normal + (same - turned) * normal.mT


def _follow(
    factors: Float[Tensor, "draws length width"], layers: Sequence[AttentionLayer], generator: torch.Generator
) -> tuple[Float[Tensor, "layers draws"], Float[Tensor, "layers draws"]]:
    entropies, residuals = [], []
    for layer in layers:
        attention, factors = step(factors, layer, generator)
        entropies.append(_normalised_entropy(attention, causal=layer.causal))
        residuals.append(rank_residual(factors @ factors.mT))
    return torch.stack(entropies), torch.stack(residuals)


def _normalised_entropy(attention: Float[Tensor, "draws length length"], *, causal: bool) -> Float[Tensor, " draws"]:
    entropy, length = statistics.entropy(attention), attention.shape[-1]
    if not causal:
        return entropy.mean(-1) / math.log(length)
    return (entropy[..., 1:] / torch.arange(2, length + 1).to(entropy).log()).mean(-1)


def _repeat(factors: Float[Tensor, "batch length width"], num_draws: int) -> Iterator[Tensor]:
    """Yield every kernel's factor `num_draws` times, a bounded number at once."""
    at_once = max(1, VARIATES_AT_ONCE // factors[0].numel())
    owners = torch.arange(len(factors)).repeat(num_draws)
    for some in owners.split(at_once):
        yield factors[some.to(factors.device)]


def _estimate(values: Float[Tensor, "layers draws"]) -> Estimate:
    return Estimate(values.mean(-1), values.std(-1, correction=0) / math.sqrt(values.shape[-1]))


def _check(kernel: Tensor, layers: Sequence[AttentionLayer], num_draws: int) -> None:
    if kernel.shape[-1] < 2:
        raise refusal("at least two tokens", kernel.shape[-1])
    if not bool(torch.isfinite(kernel).all()):
        raise refusal("a finite kernel", "NaN or infinity")
    if not layers:
        raise refusal("at least one layer", 0)
    if num_draws < 1:
        raise refusal("at least one draw", num_draws)
    for layer in layers:
        if not all(math.isfinite(number) for number in (layer.trace, layer.deviation, layer.sink)):
            raise refusal("a finite trace, deviation and sink", layer)
        if layer.deviation < 0 or not -1 <= layer.symmetry <= 1:
            raise refusal("a deviation of at least 0 and a symmetry from −1 to 1", layer)
