"""Reach of an attention call, and the bias that distance adds to its logits, read from the call itself."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ...attention.calls import AttentionCall
from ...attention.masks import plain_mask
from ...errors import refusal

ROWS = 32  # queries whose masks are looked at together


class Reach(NamedTuple):
    """Bounds of the distance, None where it has none, and ALiBi's slopes as the tables hold them."""

    lookback: int | None
    lookahead: int | None
    alibi: Callable[[Any, int], float] | None


def reach(call: AttentionCall, allowed: float) -> Reach:
    """Read the call's mask, window, rule and added numbers; refused where these are of a kind that no head has."""
    shape = (*call.query.shape[:3], call.key.shape[2])
    if call.score is not None and not _is_identity(call.score, shape):
        raise refusal("logits that no function changes", "a score_mod")
    if call.slopes is None and not (call.attn_mask is not None and call.attn_mask.is_floating_point()):
        return Reach(*_limits(call, shape), None)
    admitted, added = _mask(call, shape)
    slopes = explain_added(added, admitted, allowed)
    if slopes is None:
        raise refusal("numbers added to the logits that fall with distance, as ALiBi's do", "another float mask")
    return Reach(*explain_mask(admitted.flatten(0, 1)), (lambda config, head: slopes[head]) if slopes else None)


def _limits(call: AttentionCall, shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """(lookback, lookahead) of a call that adds nothing to logits, some queries at a time: no mask of all pairs."""
    keys, distances = torch.arange(shape[3]), [torch.empty(0, dtype=torch.long)]
    for rows in _blocks(shape):
        admitted = call.admitted(rows).cpu()
        admitted = admitted.flatten(0, -3).any(0) if admitted.dim() > 2 else admitted
        queries = torch.arange(shape[2])[rows, None]
        # Distances, not counts of keys: where a text is padded, every query would seem to see less than it may.
        seen = (queries - keys)[admitted.expand(len(queries), len(keys))]
        distances.append(torch.stack([seen.max(), seen.min()]) if len(seen) else seen)
    return _bounded(torch.cat(distances), shape[2], shape[3])


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    return (slice(start, min(start + ROWS, shape[2])) for start in range(0, shape[2], ROWS))


def _mask(call: AttentionCall, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the keys that each query of each head may see, and the bias on its logits."""
    admitted, added = call.admitted().cpu(), torch.zeros(shape)
    if call.attn_mask is not None and call.attn_mask.is_floating_point():
        added = added + plain_mask(call.attn_mask).float().cpu()
    if call.slopes is not None:
        added = added - call.slopes.float().cpu().reshape(-1, shape[1], 1, 1) * call.distance().cpu().abs()
    return admitted.expand(shape), added


def explain_mask(admitted: Bool[Tensor, "batch queries keys"]) -> tuple[int | None, int | None]:
    """(lookback, lookahead) of what a mask admits; None where it reaches as far as the text. Padding is ignored."""
    _, num_queries, num_keys = admitted.shape
    distance = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
    return _bounded(distance[admitted.any(0)], num_queries, num_keys)


def _bounded(seen: Int[Tensor, " distances"], num_queries: int, num_keys: int) -> tuple[int | None, int | None]:
    if num_keys == 1 or not len(seen):
        return None, None
    lookback, lookahead = int(seen.max()), int(-seen.min())
    ends = num_queries - 1, num_keys - 1
    return None if lookback >= ends[0] else lookback, None if lookahead >= ends[1] else max(lookahead, 0)


def explain_added(
    added: Float[Tensor, "batch heads queries keys"], admitted: Bool[Tensor, "batch heads queries keys"], allowed: float
) -> tuple[float, ...] | None:
    """ALiBi's slopes, one per head, if what is added falls with distance; () if nothing is added; else None.

    A number that is the same for all keys of a query changes nothing.
    """
    added = added.masked_fill(~admitted, 0.0)
    if not bool(added.any()):
        return ()
    if min(added.shape[-2:]) < 2:
        return None
    distance = (torch.arange(added.shape[-2])[:, None] - torch.arange(added.shape[-1])).to(added)
    slopes = (added[:, :, -1, 1] - added[:, :, -1, 0])[0]
    rest = added + slopes[:, None, None] * distance
    spread = rest.masked_fill(~admitted, -torch.inf).amax(-1) - rest.masked_fill(~admitted, torch.inf).amin(-1)
    fits = bool((spread <= 10 * allowed * max(float(added.abs().max()), 1.0)).all())
    return tuple(slopes.tolist()) if fits else None


def _is_identity(score: Callable[..., Tensor], shape: tuple[int, ...]) -> bool:
    for rows in _blocks(shape):
        part = (*shape[:2], rows.stop - rows.start, shape[3])
        given = torch.linspace(-3, 3, part[2] * part[3]).reshape(1, 1, *part[2:])
        text, head, query, key = _indices(shape)
        if not torch.equal(score(given, text, head, query[:, :, rows], key).expand(part), given.expand(part)):
            return False
    return True


def _indices(shape: tuple[int, ...]) -> list[Tensor]:
    """Batch, head, query and key, to be broadcast against each other."""
    return [torch.arange(size).reshape([-1 if n == axis else 1 for n in range(4)]) for axis, size in enumerate(shape)]
