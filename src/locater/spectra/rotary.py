"""The moments of a head with rotary positions, W(Δ) = W_K^T R_Δ W_Q, as forms in cosines and sines of the offset Δ."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import refusal
from .grams import Grams


class RotaryForms(NamedTuple):
    """tr W(Δ) = g·z, tr W(Δ)² = z^T H z, ‖W(Δ)‖² = z^T F z, with z = `rotation(Δ)`.

    R_Δ = Σ_a z_a B_a, where the B_a are, in this order, the identity on each pair, the identity on all rows that do
    not turn, and the quarter turn of each pair (and of nothing, so that both halves are of one length).
    """

    trace: Float[Tensor, "*#batch terms"]
    square: Float[Tensor, "*#batch terms terms"]
    norm: Float[Tensor, "*#batch terms terms"]


def rotation(
    offsets: Float[Tensor, " offsets"], frequencies: Float[Tensor, " pairs"], *, amplitude: float = 1.0
) -> Float[Tensor, "offsets terms"]:
    """z(Δ) = (a² cos f_1Δ …, 1, a² sin f_1Δ …, 0); the amplitude a multiplies the rotated query and the rotated key."""
    angles = offsets.double()[:, None] * frequencies.double().to(offsets.device)
    one, none = torch.ones_like(offsets)[:, None], torch.zeros_like(offsets)[:, None]
    return torch.cat([angles.cos() * amplitude**2, one, angles.sin() * amplitude**2, none], dim=-1)


def rotary_forms(products: Grams, pairs: Int[Tensor, "pairs 2"]) -> RotaryForms:
    """g_a = tr(B_a N), H_ab = tr(B_a N B_b N), F_ab = tr(B_a G_Q B_b^T G_K), with N = W_Q W_K^T.

    Every B is zero outside one diagonal block, so each entry is a sum over one block of an elementwise product:
    O(d_h²) per head for all of them.
    """
    count, size = len(pairs), products.core.shape[-1]
    order = _order(pairs.to(products.core.device), size)
    if not torch.equal(order, torch.arange(size, device=order.device)):  # interleaved pairs, or rows that do not turn
        products = Grams(*(product[..., order, :][..., order] for product in products))
    core, query, key = products
    crossed = core.mT.contiguous()
    halves = crossed[..., :count, count : 2 * count], crossed[..., count : 2 * count, :count]
    turned = torch.sub(*(half.diagonal(dim1=-2, dim2=-1) for half in halves))
    plain = _pair_sums(core.diagonal(dim1=-2, dim2=-1), count)
    return RotaryForms(
        torch.cat([plain, turned, turned.new_zeros(*turned.shape[:-1], 1)], dim=-1),
        _block_form(crossed, core, turn=1, count=count),
        _block_form(query, key, turn=-1, count=count),  # both are their own transpose, and B^T = −B for a turn
    )


def _order(pairs: Int[Tensor, "pairs 2"], d_head: int) -> Int[Tensor, " d_head"]:
    """Row indices: the first row of every pair, the second of every pair, the rest."""
    named = pairs.T.flatten()
    if len(named.unique()) < len(named) or bool(((named < 0) | (named >= d_head)).any()):
        raise refusal(f"pairs of different rows from 0 to {d_head - 1}", pairs.tolist())
    free = torch.ones(d_head, dtype=torch.bool, device=pairs.device)
    free[named] = False
    return torch.cat([named, free.nonzero()[:, 0]])


def _pair_sums(values: Float[Tensor, "*batch rows"], count: int) -> Float[Tensor, "*batch groups"]:
    """Sum the last axis over the two rows of each pair, and over all rows that do not turn."""
    rest = values[..., 2 * count :].sum(-1, keepdim=True)
    return torch.cat([values[..., :count] + values[..., count : 2 * count], rest], dim=-1)


def _block_form(
    left: Float[Tensor, "*#batch d_head d_head"],
    right: Float[Tensor, "*#batch d_head d_head"],
    *,
    turn: int,
    count: int,
) -> Float[Tensor, "*batch terms terms"]:
    """tr(X L Y R^T) for X, Y among all B, where a quarter turn for Y counts `turn` times.

    In 2×2 blocks, over first and second rows of the pairs, a quarter turn exchanges halves and changes one sign.
    """
    first, second, rest = slice(count), slice(count, 2 * count), slice(2 * count, None)
    plain = _row_sums(left[..., first] * right[..., first] + left[..., second] * right[..., second], count)
    alone = _row_sums((left[..., rest] * right[..., rest]).sum(-1, keepdim=True), count)
    mixed = _row_sums(left[..., second] * right[..., first] - left[..., first] * right[..., second], count) * turn
    both = (
        left[..., first, second] * right[..., second, first]
        + left[..., second, first] * right[..., first, second]
        - left[..., first, first] * right[..., second, second]
        - left[..., second, second] * right[..., first, first]
    ) * turn
    form = plain.new_zeros(*plain.shape[:-2], 2 * count + 2, 2 * count + 2)
    form[..., : count + 1, :count], form[..., : count + 1, count : count + 1] = plain, alone
    form[..., : count + 1, count + 1 : -1], form[..., count + 1 : -1, : count + 1] = mixed, mixed.mT
    form[..., count + 1 : -1, count + 1 : -1] = both
    return form


def _row_sums(values: Float[Tensor, "*batch rows columns"], count: int) -> Float[Tensor, "*batch groups columns"]:
    """`_pair_sums` over rows instead, without a transposed copy."""
    pairs = values[..., :count, :] + values[..., count : 2 * count, :]
    return torch.cat([pairs, values[..., 2 * count :, :].sum(-2, keepdim=True)], dim=-2)
