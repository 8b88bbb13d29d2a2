"""Latent attention (DeepSeek, Kimi) for stabilisers: heads whose weights are products of parameters.

W_K,h = U_h A, U_h of size d_h×(rank + rope): the up projection times the inner norm's gain, and ones for the rows that
all heads share. Every Gram product goes through A A^T of size rank×rank; no head's d_h×d weight is made.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import refusal
from ...models.live.tensors import ModuleTensors
from ...models.slices import Latent, Slices
from ...projections import whole, widen
from ...spectra import Grams, Moments, gram_products, moments_of
from ..penalty import Gain
from ..scales import Scale
from .pairs import Pair, PerHead
from .weights import LiveWeight, Rows, find_rows, find_weight


@dataclass(frozen=True)
class Inner:
    """Input of an up projection: the down projection, and the gain of the norm between them."""

    down: LiveWeight
    gain: LiveWeight | None
    rank: int

    def stored(self) -> list[LiveWeight]:
        return [self.down] if self.gain is None else [self.down, self.gain]


@dataclass(frozen=True)
class LatentPair(Pair):
    """`query` and `key` are the rows of the up projections, the key's without the rope rows, which are `down`'s last.

    `query_inner` is None where queries are projected directly.
    """

    key_inner: Inner
    query_inner: Inner | None

    @property
    def is_stored(self) -> bool:
        return False

    @property
    def num_nope(self) -> int:
        """Rows of a head without positions: those that the up projection of the keys gives."""
        return self.key.d_head

    def parts(self) -> list[LiveWeight]:
        """Everything that the heads are made of."""
        inner = [*self.key_inner.stored(), *(self.query_inner.stored() if self.query_inner else [])]
        return [self.query.weight, self.key.weight, *inner]

    def leaves(self) -> dict[str, nn.Parameter]:
        leaves: dict[str, nn.Parameter] = {}
        for part in self.parts():
            stored = {part.name: part.read()} if part.is_stored else part.parameters()
            leaves |= {f"{part.name}: {name}": one for name, one in stored.items() if one.requires_grad}  # type: ignore
        return leaves

    def value(self, scale: Scale, gain: Gain) -> Float[Tensor, ""]:
        with torch.autocast(self.weights()[0].device.type, enabled=False):
            return scale.value(self.grams(gain), d_model=self.d_model, rotary=self.rotary).sum()

    def traces(self, gain: Gain) -> PerHead:
        return self.grams(gain).trace

    def moments(self, gain: Gain) -> Moments:
        return moments_of(self.grams(gain), d_model=self.d_model)

    def clip(self, factors: PerHead) -> None:
        """q_nope and k_nope by √γ, q_rope by γ, the shared k_rope as it is: every logit by γ (Kimi's MuonClip).

        Frozen keys leave it all to the query.
        """
        if not self.query.weight.is_trained:
            raise refusal("trained queries to clip", f"frozen ones in {self.name}")
        moves_key = self.key.weight.is_trained
        nope = (factors.sqrt() if moves_key else factors)[..., None].expand(-1, -1, self.num_nope)
        rope = factors[..., None].expand(-1, -1, self.query.d_head - self.num_nope)
        self.query.scale(torch.cat([nope, rope], -1))
        if moves_key:
            self.key.scale(nope)

    def grams(self, gain: Gain = None) -> Grams:
        """M, G_Q and G_K of all heads as (heads, 1, d_h, d_h), differentiable by every part; gathers shards."""
        up_key, down_key = self._factors(self.key, self.key_inner, gain)
        if self.query_inner is None:
            query = _folded(self.query.view(_full(self.query.weight)), gain)
            core = up_key @ (down_key @ query.mT)
            return Grams(core, query @ query.mT, up_key @ (down_key @ down_key.mT) @ up_key.mT)
        up_query, down_query = self._factors(self.query, self.query_inner, gain)
        core, own, key = gram_products(down_query, down_key)
        return Grams(up_key @ core @ up_query.mT, up_query @ own @ up_query.mT, up_key @ key @ up_key.mT)

    def _factors(self, rows: Rows, inner: Inner, gain: Gain) -> tuple[Tensor, Tensor]:
        """U of every head, and the A that all of them share."""
        up, down = rows.view(_full(rows.weight)), _folded(_full(inner.down), gain)
        up = up if inner.gain is None else up * _full(inner.gain)
        direct = len(down) - inner.rank
        if direct:
            same = torch.eye(direct, dtype=up.dtype, device=up.device).expand(*up.shape[:2], -1, -1)
            blank = up.new_zeros(*up.shape[:2], up.shape[2], direct), up.new_zeros(*up.shape[:2], direct, inner.rank)
            up = torch.cat([torch.cat([up, blank[0]], -1), torch.cat([blank[1], same], -1)], -2)
        return up, down


def _full(weight: LiveWeight) -> Tensor:
    return widen(whole(weight.read()))


def _folded(matrix: Tensor, gain: Gain) -> Tensor:
    return matrix if gain is None else matrix * gain.to(matrix)


def latent_pair(module: Slices, tensors: ModuleTensors) -> LatentPair | None:
    """The heads of a layer of latent attention; None where they are made in another way than `LatentPair` knows."""
    head = module.heads[0]
    query = find_rows([[rows.query] for rows in module.heads], tensors, module.caller)
    key = find_rows([[rows.key] for rows in module.heads], tensors, module.caller)
    if head.key.latent is None or module.is_normed or query is None or key is None:
        return None
    inner = [None if side.latent is None else _inner(side.latent, tensors) for side in (head.key, head.query)]
    if inner[0] is None or (inner[1] is None) != (head.query.latent is None):
        return None
    place = (module.block, module.layer, head.head, query, key, 1 / module.scale, module.widths[0], module.rotary)
    return LatentPair(*place, key_inner=inner[0], query_inner=inner[1])


def _inner(latent: Latent, tensors: ModuleTensors) -> Inner | None:
    norm = latent.norm
    if latent.down.transposed or (norm is not None and (norm.plus_one or norm.times != 1)):
        return None
    gain = None if latent.gain is None else find_weight(tensors, latent.gain)
    return Inner(find_weight(tensors, latent.down.parameter), gain, latent.down.count)
