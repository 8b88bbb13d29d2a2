"""W ↦ W/σ(W) of queries and keys: spectral normalisation."""

from collections.abc import Sequence

from torch import nn
from torch.nn.utils import parametrize

from locater.models.live.explicit import Explicit
from locater.models.live.watch import Sample
from locater.stabilisers.base import Stabiliser
from locater.stabilisers.live.find import find_pairs
from locater.stabilisers.live.sharding import check_not_spread
from locater.stabilisers.live.weights import Rows
from locater.stabilisers.rivals.reparametrisation import SpectralScale, remove


class SpectralNorm(Stabiliser):
    """W ↦ W/σ(W) (Miyato et al. 2018, arXiv 1802.05957) on queries and keys.

    The queries of all heads of a layer, and the keys, each with spectral norm one; values are not touched.

    `detach()` gives the raw weights back; `detach(bake=True)` leaves the normalised ones.
    """

    def __init__(self, model: nn.Module, *, heads: Sequence[Explicit] = (), sample: Sample | None = None) -> None:
        check_not_spread(model)
        blocks: dict[tuple[int, str], list[Rows]] = {}
        for pair in find_pairs(model, heads=heads, sample=sample, trained=False):
            for rows in (pair.query, pair.key):
                blocks.setdefault((id(rows.weight.module), rows.weight.attribute), []).append(rows)
        weights = [rows[0].weight for rows in blocks.values()]
        self.places = [(weight.module, weight.attribute) for weight in weights]
        for (module, attribute), several in zip(self.places, blocks.values(), strict=True):
            indices = [rows.places.flatten() for rows in several]
            scale = SpectralScale(getattr(module, attribute), blocks=indices, axis=several[0].row_axis, gain=None)
            parametrize.register_parametrization(module, attribute, scale)

    def detach(self, *, bake: bool = False) -> None:
        for module, attribute in self.places:
            remove(module, attribute, bake=bake)
