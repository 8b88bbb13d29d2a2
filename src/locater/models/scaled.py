"""Weights of eight bits that lie beside their scales, as DeepSeek-V3 and vLLM's tools publish them."""

import torch
from torch import Tensor

from ..errors import refusal
from ..projections import size
from .schema import Config

SUFFIXES = ("_scale_inv", "_scale")  # both multiply, whatever the first is called


def unscale(weight: Tensor, scale: Tensor | None, config: Config, *, name: str, rows: tuple[int, int] | None) -> Tensor:
    """The weight in float32: one scale for all, one per row, or one per block of `weight_block_size`.

    `weight` may be a range of rows; `scale` belongs to the whole tensor.
    """
    if scale is None:
        raise refusal(f"a scale beside the eight-bit `{name}`", "none", "convert the checkpoint to 16 bits")
    if weight.dim() != 2 or scale.dim() > 2:
        raise refusal(f"matrices for the eight-bit `{name}` and its scale", f"{size(weight)} and {size(scale)}")
    scale, (start, stop) = scale.float(), rows or (0, len(weight))
    if scale.numel() > 1 and (scale.dim() == 1 or scale.shape[1] == 1):
        scale = scale.reshape(-1, 1)[start:stop]
    elif scale.numel() > 1:
        height, width = config.get("quantization_config.weight_block_size", (128, 128))
        down, across = torch.arange(start, stop) // height, torch.arange(weight.shape[1]) // width
        if down.max() >= scale.shape[0] or across.max() >= scale.shape[1]:
            raise refusal(f"a scale for every {height}×{width} block of `{name}`", size(scale))
        scale = scale[down][:, across]
    if scale.numel() > 1 and len(scale) != len(weight):
        raise refusal(f"a scale for each of the {len(weight)} rows of `{name}`", size(scale))
    return weight.float() * scale
