"""Texts drawn from the moments of a layer's inputs: Gaussian tokens, with what is kept apart put in its place."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..attention.moments import InputMoments
from .inputs import Inputs

SMALLEST = 1e-6  # eigenvalues of a covariance below this share of the mean one are rounding


@dataclass(frozen=True, eq=False)
class Gaussian:
    """mean + root · z + residual ∘ z', z and z' white."""

    mean: Float[Tensor, " d_model"]
    root: Float[Tensor, "d_model rank"]
    residual: Float[Tensor, " d_model"] | None = None

    def draw(self, count: int, generator: torch.Generator) -> Float[Tensor, "count d_model"]:
        noise = torch.randn(count, self.root.shape[1], generator=generator)
        drawn = self.mean + noise @ self.root.mT
        if self.residual is None:
            return drawn
        return drawn + self.residual * torch.randn(drawn.shape, generator=generator)


def gaussian(moments: InputMoments, *, less: Tensor | None = None) -> Gaussian:
    """The Gaussian of these moments; `less` is a part of the covariance that is accounted for elsewhere."""
    covariance = moments.core[0]
    if less is not None:
        basis = moments.basis
        covariance = covariance - (less if basis is None else basis.mT @ less @ basis)
    values, vectors = torch.linalg.eigh(covariance)
    kept = values > SMALLEST * values.clamp(min=0).mean()
    root = vectors[:, kept] * values[kept].sqrt()
    root = root if moments.basis is None else moments.basis @ root
    residual = None if moments.residual is None else moments.residual.sqrt().float()
    return Gaussian(moments.mean.float(), root.float(), residual)


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws texts; tokens are independent of each other, which `expected.lag_shift` makes up for in the mean."""

    inputs: Inputs
    ordinary: Gaussian
    alone: dict[int, Gaussian]
    echo: Gaussian | None
    offsets: Float[Tensor, "tokens d_model"] | None

    @classmethod
    def of(cls, inputs: Inputs, *, offsets: Tensor | None = None) -> "Sampler":
        less = None if offsets is None else (offsets.mT @ offsets / len(offsets)).double()
        return cls(
            inputs,
            gaussian(inputs.ordinary, less=less),
            {position: gaussian(moments) for position, moments in inputs.alone.items()},
            None if inputs.echo is None else gaussian(inputs.echo),
            offsets,
        )

    def draw(
        self, count: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, "count tokens d_model"], Bool[Tensor, "count tokens"]]:
        """Texts, and which of their tokens are ordinary."""
        length = self.inputs.length
        x = self.ordinary.draw(count * length, generator).unflatten(0, (count, length))
        if self.offsets is not None:
            x = x + self.offsets
        ordinary = torch.ones(count, length, dtype=torch.bool)
        if self.echo is not None:
            repeated = torch.rand(count, length, generator=generator) < self.inputs.echo_rate
            x[repeated] = self.echo.draw(int(repeated.sum()), generator)
            ordinary &= ~repeated
        for position, tokens in self.alone.items():
            x[:, position] = tokens.draw(count, generator)
            ordinary[:, position] = False
        return x, ordinary
