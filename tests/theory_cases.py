"""Heads of every construction, and a slow reference for ρ_t that shares no code with the package."""

import itertools
import math

import numpy as np
import torch
from scipy.integrate import quad
from scipy.stats import norm

CONSTRUCTIONS = ("asymmetric", "symmetric", "antisymmetric", "rank-one", "negative")


def construct(kind: str, d_head: int, *, seed: int = 0, scale: float = 1.0, extra: int = 3):
    """Query and key (d_h, 2 d_h + extra) of a head whose scale η is about `scale`·√d_h."""
    generator = torch.Generator().manual_seed(seed)
    d_model = 2 * d_head + extra
    query, other = (torch.randn(d_head, d_model, generator=generator, dtype=torch.float64) for _ in range(2))
    mixing = torch.randn(d_head, d_head, generator=generator, dtype=torch.float64)
    key = {
        "asymmetric": other,
        "symmetric": query,
        "antisymmetric": (mixing - mixing.mT) @ query,
        "rank-one": mixing[:, :1].sign() @ other[:1],
        "negative": 0.3 * other - query,
    }[kind]
    norm = math.sqrt(float(((query @ query.mT) * (key @ key.mT)).sum()))
    return query, key * (scale * math.sqrt(d_head) / norm if norm else 1)


def check_matrix() -> torch.Tensor:
    """The 6×6 matrix of the published check values."""
    index = torch.arange(1, 7, dtype=torch.float64)
    return 0.6 * torch.eye(6, dtype=torch.float64) + 0.25 * torch.sin(3 * index[:, None] + 7 * index)


def reference(query, key, position: int, *, length: int, temperature: float) -> float:
    """ρ_t from the dense quadratic form in all T steps and Imhof's integral: no reduction, no interpolation."""
    form = (key.mT @ query).numpy() / temperature
    steps = np.arange(1, length + 1)
    weights = (steps <= position) - (length - steps + 1) / length
    whole = np.kron(np.outer(weights, np.ones(length)), form)
    values = np.linalg.eigvalsh((whole + whole.T) / 2)
    values = values[np.abs(values) > 1e-10 * np.abs(values).max()]
    if len(values) == 2:
        return 1 - two(-values[0], values[1], 1.0) - two(values[1], -values[0], length - 1.0)
    return imhof(values, -1.0) - imhof(values, length - 1.0)


def two(up: float, down: float, threshold: float) -> float:
    """P(up·X² − down·Y² > x) for x > 0, by an integral over Y on a logarithmic scale."""

    def given(log_normal: float) -> float:
        normal = math.exp(log_normal)
        return float(4 * normal * norm.pdf(normal) * norm.sf(math.sqrt((threshold + down * normal**2) / up)))

    knee = 0.5 * math.log((threshold + up) / down)
    ends = sorted({-60.0, 4.0, *(min(4.0, max(-60.0, knee + shift)) for shift in (-20, -5, 0, 1, 2, 5))})
    return sum(quad(given, *piece, epsabs=1e-14, limit=200)[0] for piece in itertools.pairwise(ends))


def imhof(values, threshold: float) -> float:
    """P(Σ λ_j χ² > x) = ½ + (1/π) ∫_0^∞ sin θ(u) / (u r(u)) du (Imhof 1961)."""

    def integrand(u: float) -> float:
        angle = 0.5 * np.arctan(values * u).sum() - 0.5 * threshold * u
        return math.sin(angle) / (u * math.exp(0.25 * np.log1p((values * u) ** 2).sum()))

    return 0.5 + quad(integrand, 0, np.inf, limit=4000, epsabs=1e-11, epsrel=1e-11)[0] / math.pi
