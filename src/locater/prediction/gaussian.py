"""Gaussian tokens of given moments."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.input_moments import InputMoments

SMALLEST = 1e-6  # eigenvalues of a covariance below this share of the mean one are rounding


@dataclass(frozen=True, eq=False)
class Gaussian:
    """mean + root · z + residual ∘ z', z and z' white: the covariance is root rootᵀ + residual²."""

    mean: Float[Tensor, " d_model"]
    root: Float[Tensor, "d_model rank"]
    residual: Float[Tensor, " d_model"] | None = None

    def draw(self, count: int, generator: torch.Generator) -> Float[Tensor, "count d_model"]:
        drawn = self.mean + torch.randn(count, self.root.shape[1], generator=generator) @ self.root.mT
        if self.residual is None:
            return drawn
        return drawn + self.residual * torch.randn(drawn.shape, generator=generator)


def of_tokens(tokens: Float[Tensor, "count d_model"]) -> Gaussian:
    """The Gaussian of a few tokens: centred and over √count, they are a root of their covariance themselves."""
    mean = tokens.mean(0)
    return Gaussian(mean, (tokens - mean).mT / len(tokens) ** 0.5)


def of_moments(moments: InputMoments) -> Gaussian:
    """The Gaussian of these moments, its root in principal directions; one r×r eigenvalue problem."""
    values, vectors = torch.linalg.eigh(moments.core[0])
    kept = values > SMALLEST * values.clamp(min=0).mean()
    root = vectors[:, kept] * values[kept].sqrt()
    root = root if moments.basis is None else moments.basis @ root
    residual = None if moments.residual is None else moments.residual.sqrt().float()
    return Gaussian(moments.mean.float(), root.float(), residual)
