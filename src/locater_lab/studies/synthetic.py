"""Layers whose spectra are set by construction: W = m·1 + s·B diag(z) B^T, λ = √d, on walks and on words of a text."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from locater.attention import residual, statistics
from locater.spectra import Moments
from locater.texts import embedded_text
from locater.theory import closed_form, regimes

from ..train.model import sinusoids

NUM_LAST = 4  # the last tokens that count as near: short texts are used here
SINK_LOGIT = 4.0


@dataclass(frozen=True)
class Spectrum:
    """tr W/λ and √d·(standard deviation of the eigenvalues)/λ: the axes of the phase diagram."""

    trace: float
    deviation: float

    def moments(self, d_model: int) -> Moments:
        temperature = math.sqrt(d_model)
        trace = torch.tensor(self.trace * temperature, dtype=torch.float64)
        square = trace.square() / d_model + (self.deviation * temperature) ** 2
        return Moments(trace, square, square, d_model=d_model, d_head=d_model)

    def profile(self, *, length: int, d_model: int) -> Float[Tensor, " length"]:
        return closed_form.from_moments(self.moments(d_model), length=length, temperature=math.sqrt(d_model))

    def matrix(self, d_model: int, generator: torch.Generator) -> Float[Tensor, "d d"]:
        """Gaussian eigenvalues of exactly this mean and deviation in a random basis."""
        z = torch.randn(d_model, generator=generator, dtype=torch.float64)
        z = (z - z.mean()) / z.std(correction=0)
        basis = torch.linalg.qr(torch.randn(d_model, d_model, generator=generator, dtype=torch.float64)).Q
        values = (self.trace / d_model + self.deviation * z / math.sqrt(d_model)) * math.sqrt(d_model)
        return (basis * values) @ basis.mT


def of_xi_and_eta(xi: float, eta: float, *, d_model: int) -> Spectrum:
    """The symmetric spectrum with tr W = ξη and tr W² = η²; η in units of λ; exists where ξ² ≤ d."""
    assert xi**2 <= d_model, "tr W² is at least (tr W)²/d"
    return Spectrum(xi * eta, eta * math.sqrt(1 - xi**2 / d_model))


def tokens(
    kind: str, *, count: int, length: int, d_model: int, generator: torch.Generator
) -> Float[Tensor, "count length d_model"]:
    """`walk`: a Gaussian random walk. `text`: words of the embedded text, a random vector each, with positions."""
    if kind == "walk":
        return torch.randn(count, length, d_model, generator=generator, dtype=torch.float64).cumsum(1)
    numbers = _words()
    starts = torch.randint(len(numbers) - length, (count,), generator=generator)
    table = torch.randn(int(numbers.max()) + 1, d_model, generator=generator, dtype=torch.float64)
    x = torch.stack([table[numbers[start : start + length]] for start in starts.tolist()])
    return normed(x + sinusoids(length, d_model).double())


@cache
def _words() -> Tensor:
    words = embedded_text()[:400_000].split()
    known = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return torch.tensor([known[word] for word in words])


def normed(x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
    """Mean 0 and variance 1 of every token: LayerNorm without a gain."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def attend_densely(x: Float[Tensor, "batch n d"], matrix: Float[Tensor, "d d"], *, sink: bool = False) -> Tensor:
    """Causal attention weights, query by key, of ω = x_t W x_T / λ; a sink adds to every logit of the first token."""
    logits = (x @ matrix @ x.mT).mT / math.sqrt(x.shape[-1])
    logits[..., 0] += SINK_LOGIT * sink
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return logits.masked_fill(future, -math.inf).softmax(-1)


def synthetic_layers(x: Tensor, matrices: list[Tensor], *, has_norm: bool, sink: bool = False) -> dict[str, float]:
    """x ← x + A x layer by layer (with norms: of normed x), values as they are: what becomes of attention and rank."""
    start, entropies, near = residual(x).mean(), [], []
    for matrix in matrices:
        read = normed(x) if has_norm else x
        weights = attend_densely(read, matrix, sink=sink)
        entropies.append(normalised_entropy(weights))
        near.append(near_share(weights))
        x = x + weights @ read if has_norm else weights @ read
    return {
        "entropy": float(torch.stack(entropies).mean()),
        "near_mass": float(torch.stack(near).mean()),
        "residual": float(residual(x).mean() / start),
    }


def normalised_entropy(weights: Float[Tensor, "*batch n n"]) -> Float[Tensor, ""]:
    """The mean over queries with at least two keys."""
    counts = torch.arange(1, weights.shape[-1] + 1)
    return statistics.normalise(statistics.entropy(weights), counts).nanmean()


def near_share(weights: Float[Tensor, "*batch n n"]) -> Float[Tensor, ""]:
    """Mass on the last `NUM_LAST` tokens, over the queries of the second half, which have a past to choose from."""
    positions = torch.arange(weights.shape[-1])
    found = statistics.near_mass(weights, positions[:, None] - positions, NUM_LAST)
    return found[..., weights.shape[-1] // 2 :].mean()


def regime(spectrum: Spectrum, *, length: int, d_model: int) -> str:
    """The theory's word for it."""
    return regimes.classify(spectrum.profile(length=length, d_model=d_model))
