"""From weights to Gram matrices, and from the slope by these back to the weights: the products of every step."""

from jaxtyping import Float
from torch import Tensor

from ..spectra import Grams


def gram_matrices(
    query: Float[Tensor, "groups heads d_head columns"], key: Float[Tensor, "groups 1 d_head columns"]
) -> Grams:
    """M, G_Q and G_K: three d_h×d×d_h products, without the checks of `spectra.grams`, which would stall a GPU."""
    num_heads, queries, keys = query.shape[1], query.flatten(1, 2), key[:, 0]
    # All heads of a group in one product: broadcasting would copy the key for each of them.
    core = (keys @ queries.mT).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return Grams(core, query @ query.mT, key @ key.mT)


def pull_back(
    slope: Grams,
    query: Float[Tensor, "groups heads d_head columns"],
    key: Float[Tensor, "groups 1 d_head columns"],
) -> tuple[Float[Tensor, "groups heads d_head columns"], Float[Tensor, "groups 1 d_head columns"]]:
    """∇_Q = D_M^T W_K + 2 D_Q W_Q and ∇_K = Σ_heads D_M W_Q + 2 D_K W_K, with symmetric D_Q and D_K.

    Works on any subset of the columns, so a rank that holds some needs no others. Cost: four d_h×d_h×d products.
    """
    by_core = slope.core.mT.flatten(1, 2)  # all heads of a group above each other
    by_query = _times(by_core, key[:, 0]).unflatten(1, query.shape[1:3])
    by_key = _times(by_core.mT, query.flatten(1, 2))[:, None]
    own = slope.query.expand(*query.shape[:2], -1, -1)
    for heads in range(query.shape[1]):
        _add_twice(by_query[:, heads], own[:, heads], query[:, heads])
    _add_twice(by_key[:, 0], slope.key.sum(1), key[:, 0])
    return by_query, by_key


def _times(
    small: Float[Tensor, "batch m n"], wide: Float[Tensor, "batch n columns"]
) -> Float[Tensor, "batch m columns"]:
    """A product that lies in memory as the weights do, or adding it to them would cost as much as making it."""
    return small @ wide if wide.stride(-1) == 1 else (wide.mT @ small.mT).mT


def _add_twice(
    total: Float[Tensor, "batch m columns"], small: Float[Tensor, "batch m n"], wide: Float[Tensor, "batch n columns"]
) -> None:
    """total += 2·small·wide, in place."""
    if wide.stride(-1) == 1:
        total.baddbmm_(small, wide, alpha=2)
    else:
        total.mT.baddbmm_(wide.mT, small.mT, alpha=2)
