"""Bounds on the logits of a live model's heads, from their weights as they are: no pass is needed."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...attention.layers import logit_bounds
from ...errors import refusal
from ...models import read_heads
from ...models.live import ModuleTensors, sites
from ...models.live.explicit import Explicit
from ...models.live.watch import Sample
from ...projections import whole
from .pairs import Pair


class WholeTensors(ModuleTensors):
    """Sharded weights gathered."""

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        return whole(super().read(name, rows))


class Bounds:
    """The bounds of all heads of each pair's module; refused where no norm before attention bounds its inputs."""

    def __init__(
        self, model: nn.Module, pairs: Sequence[Pair], *, heads: Sequence[Explicit], sample: Sample | None
    ) -> None:
        tensors = WholeTensors(model)
        places = {
            (site.block, site.number): site
            for site in sites(tensors.model, heads=heads, sample=sample, tensors=tensors)
        }
        self.sites = {pair.name: places[pair.block, pair.layer] for pair in pairs}
        for name, values in self.read().items():
            layer = read_heads(self.sites[name])
            if not bool(values.isfinite().all()) or any(head.softcap is not None for head in layer.heads):
                kinds = "heads whose weights bound their logits: behind a norm, no QK-norm, soft-cap or latent keys"
                raise refusal(kinds, f"others in {name}", 'take by="logits"')

    @torch.no_grad()
    def read(self) -> dict[str, Tensor]:
        """The bounds at this moment, by the names of pairs."""
        return {name: logit_bounds(read_heads(site).heads).float() for name, site in self.sites.items()}
