"""LocAteR's penalty as a function of two weights, with its gradient in closed form: no model, no graph, no state.

With M = W_K W_Q^T, G_Q = W_Q W_Q^T, G_K = W_K W_K^T the default is Σ η² = (Σ M∘M^T + 2 Σ G_Q∘G_K)/3, and
∇_Q = (2 M W_K + 4 G_K W_Q)/3, ∇_K = (2 M^T W_Q + 4 G_Q W_K)/3. Nothing of size d×d is made.
"""

from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from ..spectra.grams import Grams, gram_products, working
from .scales import Eta, Scale


def penalty(
    query: Float[Tensor, "*#batch d_head d_model"],
    key: Float[Tensor, "*#batch d_head d_model"],
    *,
    scale: Scale | None = None,
) -> Float[Tensor, "*batch"]:
    """The scale of every head, η²(W) unless another is given; O(d·d_h²) per head, in float32 or float64.

    Keys that several heads share come as (…, 1, d_h, d) beside queries (…, heads, d_h, d). To fold in the gain of the
    norm that feeds them, give query * gain and key * gain.

    >>> import torch
    >>> query, key = torch.eye(2, 4), 3 * torch.eye(2, 4)  # W = diag(3, 3, 0, 0): η² = tr W² = 18
    >>> penalty(query, key)
    tensor(18.)
    >>> by_query, by_key = gradient(query, key)
    >>> by_query  # ∂η²/∂W_Q
    tensor([[18.,  0.,  0.,  0.],
            [ 0., 18.,  0.,  0.]])
    >>> step = 0.01  # one decoupled step with κ·lr = 0.01
    >>> penalty(query - step * by_query, key - step * by_key) < 18
    tensor(True)
    """
    query, key = working(query, key)
    return (scale or Eta()).value(gram_products(query, key), d_model=query.shape[-1])


def gradient(
    query: Float[Tensor, "*#batch d_head d_model"],
    key: Float[Tensor, "*#batch d_head d_model"],
    *,
    scale: Scale | None = None,
) -> tuple[Float[Tensor, "*#batch d_head d_model"], Float[Tensor, "*#batch d_head d_model"]]:
    """∇_Q and ∇_K of Σ penalty, shaped as the weights; a shared key gets the sum over its heads.

    Cost: seven d_h×d_h×d products per head.
    """
    query, key = working(query, key)
    slope = (scale or Eta()).slope(gram_products(query, key), d_model=query.shape[-1])
    return pull_back(slope, query, key)


def pull_back(
    slope: Grams,
    query: Float[Tensor, "*#batch d_head columns"],
    key: Float[Tensor, "*#batch d_head columns"],
) -> tuple[Float[Tensor, "*#batch d_head columns"], Float[Tensor, "*#batch d_head columns"]]:
    """From the slope D by M, G_Q, G_K: ∇_Q = D_M^T W_K + 2 D_Q W_Q, ∇_K = Σ_heads D_M W_Q + 2 D_K W_K, D_Q = D_Q^T.

    Works on any subset of the columns, so a rank that holds some needs no others. Four d_h×d_h×d products per head.
    """
    shapes = query.shape, key.shape
    query, key = _group(query, key)
    core, by_query_gram, by_key_gram = (part.reshape(len(query), -1, *part.shape[-2:]) for part in slope)
    by_core = core.mT.flatten(1, 2)  # all heads of a group above each other
    by_query = _times(by_core, key[:, 0]).unflatten(1, query.shape[1:3])
    by_key = _times(by_core.mT, query.flatten(1, 2))[:, None]
    own = by_query_gram.expand(*query.shape[:2], -1, -1)
    for head in range(query.shape[1]):
        _add_twice(by_query[:, head], own[:, head], query[:, head])
    _add_twice(by_key[:, 0], by_key_gram.sum(1), key[:, 0])
    return by_query.view(shapes[0]), by_key.view(shapes[1])


def _group(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape to (groups, heads, d_h, d) and (groups, 1, d_h, d)."""
    if query.shape == key.shape:
        return tuple(weight.reshape(-1, 1, *weight.shape[-2:]) for weight in (query, key))  # type: ignore[return-value]
    if query.dim() > 2 and key.shape == (*query.shape[:-3], 1, *query.shape[-2:]):
        return tuple(weight.reshape(-1, *weight.shape[-3:]) for weight in (query, key))  # type: ignore[return-value]
    shapes = f"{tuple(query.shape)} and {tuple(key.shape)}"
    raise refusal("one key for each query, or shared keys of shape (…, 1, d_h, d)", shapes)


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
