"""Texts drawn from the moments of a layer's inputs: Gaussian tokens, with what is kept apart put in its place."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .gaussian import Gaussian
from .inputs import Inputs


def draw_texts(
    inputs: Inputs,
    ordinary: Gaussian,
    *,
    offsets: Float[Tensor, "tokens d_model"] | None,
    count: int,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "count tokens d_model"], Bool[Tensor, "count tokens"]]:
    """Texts, and which of their tokens are ordinary.

    Tokens are independent of each other, which `expected.lag_shift` makes up for in the mean of the logits.
    """
    length = inputs.length
    x = ordinary.draw(count * length, generator).unflatten(0, (count, length))
    x = x if offsets is None else x + offsets
    is_ordinary = torch.ones(count, length, dtype=torch.bool)
    if inputs.echo is not None:
        repeated = torch.rand(count, length, generator=generator) < inputs.echo_rate
        x[repeated] = inputs.echo.draw(int(repeated.sum()), generator)
        is_ordinary &= ~repeated
    for position, tokens in inputs.alone.items():
        x[:, position] = tokens.draw(count, generator)
        is_ordinary[:, position] = False
    return x, is_ordinary
