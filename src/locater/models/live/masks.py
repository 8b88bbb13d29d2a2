"""Reach of an attention call, and the bias that distance adds to its logits, read from the call itself."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
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
    slopes = _slopes(call, shape, allowed)
    return Reach(*_limits(call, shape), (lambda config, head: slopes[head]) if slopes else None)


def _limits(call: AttentionCall, shape: tuple[int, ...]) -> tuple[int | None, int | None]:
    """(lookback, lookahead), None where it is as far as the text; some queries at a time: no mask of all pairs."""
    keys, distances = torch.arange(shape[3]), [torch.empty(0, dtype=torch.long)]
    for rows in _blocks(shape):
        admitted = call.admitted(rows).cpu()
        admitted = admitted.flatten(0, -3).any(0) if admitted.dim() > 2 else admitted
        queries = torch.arange(shape[2])[rows, None]
        # Distances, not counts of keys: where a text is padded, every query would seem to see less than it may.
        seen = (queries - keys)[admitted.expand(len(queries), len(keys))]
        distances.append(torch.stack([seen.max(), seen.min()]) if len(seen) else seen)
    seen = torch.cat(distances)
    if shape[3] == 1 or not len(seen):
        return None, None
    lookback, lookahead = int(seen.max()), int(-seen.min())
    return None if lookback >= shape[2] - 1 else lookback, None if lookahead >= shape[3] - 1 else max(lookahead, 0)


def _blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    return (slice(start, min(start + ROWS, shape[2])) for start in range(0, shape[2], ROWS))


def _slopes(call: AttentionCall, shape: tuple[int, ...], allowed: float) -> list[float]:
    """ALiBi's slopes, one per head, if what the call adds falls with distance; none if it adds nothing; else refused.

    A number that is the same for all keys of a query changes nothing.
    """
    added = torch.zeros(shape if call.slopes is not None else (1, 1, 1, 1))
    if call.attn_mask is not None and call.attn_mask.is_floating_point():
        added = added + plain_mask(call.attn_mask).float().cpu()
    if call.slopes is not None:
        added = added - call.slopes.float().cpu().reshape(-1, shape[1], 1, 1) * call.distance().cpu().abs()
    if not bool(added.any()):
        return []
    admitted = call.admitted().cpu().expand(shape)
    added = added.masked_fill(~admitted, 0.0)
    if not bool(added.any()):  # it was no more than a mask
        return []
    other = refusal("numbers added to the logits that fall with distance, as ALiBi's do", "another float mask")
    if min(shape[2:]) < 2:
        raise other
    distance = (torch.arange(added.shape[-2])[:, None] - torch.arange(added.shape[-1])).to(added)
    slopes = (added[:, :, -1, 1] - added[:, :, -1, 0])[0]
    rest = added + slopes[:, None, None] * distance
    spread = rest.masked_fill(~admitted, -torch.inf).amax(-1) - rest.masked_fill(~admitted, torch.inf).amin(-1)
    if bool((spread > 10 * allowed * max(float(added.abs().max()), 1.0)).any()):
        raise other
    return slopes.tolist()


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
