"""The trace of every head moved to its target, by the smallest multiple of each other's weights.

Directions D_Q = W_K g² and D_K = W_Q g², g the gain that is folded in or 1: W_Q += a D_Q, W_K += a D_K.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import Refusal, refusal, within
from .live.sharding import Part

PerHead = Float[Tensor, "groups heads"]


def smaller_root(quadratic: PerHead, linear: PerHead, constant: PerHead) -> PerHead:
    """The root smaller in magnitude of A a² + B a + C = 0 with B > 0, without cancellation; NaN where none is real."""
    return -2 * constant / (linear + (linear.square() - 4 * quadratic * constant).sqrt())


def traces(part: Part, gain: Float[Tensor, " d_model"] | None = None) -> PerHead:
    """tr W of the heads at hand: Σ W_Q∘W_K, one pass over the weights."""
    key = part.key if gain is None else part.key * gain[part.columns].to(part.key).square()
    return part.complete_sums(_sums(part.query, key))


def hold_trace(
    part: Part, targets: PerHead, *, moves: tuple[bool, bool], gain: Float[Tensor, " d_model"] | None = None
) -> None:
    """Change the heads at hand so that tr W = target; `moves` says whether query, and whether key, may change.

    Both: a² Σ D_Q∘D_K g² + a (‖D_Q‖² + ‖D_K‖²) + tr W − τ = 0. One: a = (τ − tr W)/‖D‖². Keys of a group, which belong
    to several heads, stay. Cost: a few passes over the weights. Refuses a target out of reach.
    """
    moves_query, moves_key = moves[0], moves[1] and not part.pair.is_grouped
    if not (moves_query or moves_key):
        raise Refusal(f"{part.pair.name}: a frozen query with a key of several heads cannot hold each one's trace")
    square = None if gain is None else gain[part.columns].to(part.query).square()
    by_query, by_key = (part.key, part.query) if square is None else (part.key * square, part.query * square)
    present, length, product = _measure(part, by_query, by_key, square, moves=(moves_query, moves_key))
    missing = targets.to(present) - present
    multiple = smaller_root(product, length, -missing) if moves_query and moves_key else missing / length
    with within(part.pair.name):
        _check(multiple.where(missing != 0, 0), present, targets)
    multiple = multiple.where(missing != 0, 0)[..., None, None].to(part.query)
    by_query = multiple * by_query if moves_query else None
    if moves_key:
        part.key.add_(multiple * by_key)
    if by_query is not None:
        part.query.add_(by_query)


def _measure(
    part: Part, by_query: Tensor, by_key: Tensor, square: Tensor | None, *, moves: tuple[bool, bool]
) -> tuple[PerHead, PerHead, PerHead]:
    """tr W, the squared length of the directions that count, and the directions' product; one message for all."""
    present = _sums(part.query, by_query)
    product = present if square is None else _sums(by_query, by_key * square)
    length = moves[0] * _sums(by_query, by_query) + moves[1] * _sums(by_key, by_key)
    found = torch.stack(torch.broadcast_tensors(present, length, product))
    present, length, product = part.complete_sums(found).unbind(0)
    return present, length, product


def _sums(left: Tensor, right: Tensor) -> PerHead:
    """Σ L∘R for every head, the rows added up in float64: the trace is small against its terms."""
    return (left * right).sum(-1).double().sum(-1)


def _check(multiple: PerHead, present: PerHead, targets: PerHead) -> None:
    if bool(torch.isfinite(multiple).all()):
        return
    worst = int((~torch.isfinite(multiple)).flatten().nonzero()[0])
    now, wanted = float(present.flatten()[worst]), float(targets.flatten()[worst])
    if now != now:
        raise refusal("finite weights", "NaN", "the run has diverged: go back to a checkpoint")
    remedy = "choose a nearer target, a WarmUp, or start from SpectralInitialisation"
    raise refusal("a target of tr W within reach", f"{wanted:.4g} where tr W = {now:.4g}", remedy)
