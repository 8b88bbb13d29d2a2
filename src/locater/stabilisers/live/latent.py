"""Latent attention (DeepSeek, Kimi) for stabilisers: heads whose weights are products of parameters.

W_K,h = U_h A, U_h of size d_h×(rank + rope): the up projection times the inner norm's gain, and ones for the rows that
all heads share. Every Gram product goes through A A^T of size rank×rank; no head's d_h×d weight is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ...errors import refusal
from ...head import Head
from ...projections import Projection, whole, widen
from ...spectra import Grams, gram_products
from ..penalty import Gain
from .pairs import Pair, one_grid
from .weights import SPACING, Markers, Rows, Weight


@dataclass(frozen=True)
class Inner:
    """What stands before an up projection: the down projection, and the gain of the norm between them."""

    down: Weight
    gain: Weight | None
    rank: int

    def stored(self) -> list[Weight]:
        return [self.down] if self.gain is None else [self.down, self.gain]


@dataclass(frozen=True)
class LatentPair(Pair):
    """`query` and `key` are the rows of the up projections, the key's without the rope rows, which are `down`'s last.

    `query_inner` is None where queries are projected directly.
    """

    key_inner: Inner = None  # type: ignore[assignment]  # fields of the base have defaults before it
    query_inner: Inner | None = None

    @property
    def is_stored(self) -> bool:
        return False

    @property
    def num_nope(self) -> int:
        """Rows of a head without positions: those that the up projection of the keys gives."""
        return self.key.d_head

    def parts(self) -> list[Weight]:
        """Everything that the heads are made of."""
        inner = [*self.key_inner.stored(), *(self.query_inner.stored() if self.query_inner else [])]
        return [self.query.weight, self.key.weight, *inner]

    def leaves(self) -> dict[str, nn.Parameter]:
        """The trained parameters among it, by name."""
        found = {}
        for part in self.parts():
            own = {part.name: part.read()} if part.is_stored else part.parameters()
            found |= {f"{part.name}: {name}": one for name, one in own.items() if one.requires_grad}
        return found

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


def _full(weight: Weight) -> Tensor:
    return widen(whole(weight.read()))


def _folded(matrix: Tensor, gain: Gain) -> Tensor:
    return matrix if gain is None else matrix * gain.to(matrix)


def latent_pair(heads: Sequence[Head], markers: Markers) -> LatentPair | None:
    """The heads of a layer of latent attention, located in the parameters; None where they do not lie on a grid."""
    head = heads[0]
    if head.key.low_rank is None or head.query.norm is not None or head.key.norm is not None:
        return None
    key = one_grid([[one.key.low_rank.up] for one in heads if one.key.low_rank], markers)
    direct = head.query.low_rank is None
    ups = [[one.query.weight if one.query.low_rank is None else one.query.low_rank.up] for one in heads]
    query = one_grid(ups, markers)
    key_inner = _inner(head.key, markers)
    if query is None or key is None or key_inner is None:
        return None
    place = (head.block, head.layer, head.index, query, key, head.temperature, head.d_model, head.rotary)
    query_inner = None if direct else _inner(head.query, markers)
    return LatentPair(*place, key_inner=key_inner, query_inner=query_inner)


def _inner(projection: Projection, markers: Markers) -> Inner | None:
    low_rank = projection.low_rank
    if low_rank is None:
        return None
    down, first, transposed = markers.locate(low_rank.down)
    if first or transposed:
        return None
    gain = low_rank.norm.gain if low_rank.norm else None
    named = None if gain is None else markers.order[int(float(gain[0]) // SPACING)]
    return Inner(down, named, len(low_rank.down))


@torch.no_grad()
def clip_latent(pair: LatentPair, factors: Float[Tensor, "heads 1"]) -> None:
    """q_nope and k_nope by √γ, q_rope by γ, the shared k_rope as it is: every logit by γ (Kimi's MuonClip).

    Frozen keys leave it all to the query.
    """
    factors = factors[:, 0]
    moves_key = pair.key.weight.is_trained
    if not pair.query.weight.is_trained:
        raise refusal("trained queries to clip", f"frozen ones in {pair.name}")
    nope = factors.sqrt() if moves_key else factors
    rope = pair.query.d_head - pair.num_nope
    rows = torch.cat([nope[:, None].expand(-1, pair.num_nope), factors[:, None].expand(-1, rope)], 1)
    scale_rows(pair.query, rows)
    if moves_key:
        scale_rows(pair.key, nope[:, None].expand(-1, pair.num_nope))


def scale_rows(rows: Rows, factors: Float[Tensor, "heads d_head"]) -> None:
    """Multiply these rows of a parameter, and those of its bias, each by its number; sharded ones in their shards."""
    weight = rows.weight.read()
    number = torch.ones(weight.shape[rows.row_axis], dtype=torch.float32, device=weight.device)
    places = rows.first + torch.arange(rows.num_groups)[:, None] * rows.group_step + torch.arange(rows.d_head)
    number[places.to(number.device)] = factors.to(number)
    bias = getattr(rows.weight.module, rows.weight.attribute.replace("weight", "bias"), None)
    for tensor, axis in ((weight, rows.row_axis), (bias, 0)):
        if tensor is not None:
            shape = [1] * tensor.dim()
            shape[axis] = -1
            multiply(tensor.detach(), number.view(shape))


def multiply(tensor: Tensor, numbers: Tensor) -> None:
    """In place, entry by entry; what is sharded is cut alike."""
    if not isinstance(tensor, DTensor):
        tensor.mul_(numbers.to(tensor))
        return
    mesh = tensor.device_mesh
    spread = numbers.expand(tensor.shape).contiguous().to(tensor.dtype)
    same = DTensor.from_local(spread, mesh, [Replicate()] * mesh.ndim, run_check=False)
    tensor.to_local().mul_(same.redistribute(mesh, tensor.placements).to_local())
