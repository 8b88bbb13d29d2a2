"""Spectral normalisation of queries and keys: W ↦ W/σ(W) (Miyato et al. 2018, arXiv 1802.05957)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...models.live.explicit import Explicit
from ..base import Stabiliser
from ..live.pairs import find_pairs
from ..live.places import Grid
from .spectral_scale import SpectralScale, remove


class SpectralNorm(Stabiliser):
    """The queries of all heads of a layer, and the keys, each with spectral norm one; values are not touched.

    `detach()` gives the raw weights back; `detach(bake=True)` leaves the normalised ones.
    """

    def __init__(self, model: nn.Module, *, heads: Sequence[Explicit] = ()) -> None:
        blocks: dict[tuple[int, str], list[Grid]] = {}
        for pair in find_pairs(model, heads=heads, trained=False):
            for grid in (pair.query, pair.key):
                blocks.setdefault((id(grid.place.module), grid.place.attribute), []).append(grid)
        self.places = [(grids[0].place.module, grids[0].place.attribute) for grids in blocks.values()]
        for (module, attribute), grids in zip(self.places, blocks.values(), strict=True):
            weight = getattr(module, attribute)
            scale = SpectralScale(weight, blocks=[rows_of(grid) for grid in grids], axis=grids[0].row_axis, gain=None)
            parametrize.register_parametrization(module, attribute, scale)

    def detach(self, *, bake: bool = False) -> None:
        for module, attribute in self.places:
            remove(module, attribute, bake=bake)


def rows_of(grid: Grid) -> Tensor:
    """The numbers of all rows of a grid."""
    groups = torch.arange(grid.num_groups)[:, None, None] * grid.group_step
    heads = torch.arange(grid.num_heads)[:, None] * grid.head_step
    return (grid.first + groups + heads + torch.arange(grid.d_head)).flatten()
