"""Logits of an attention call: the product of queries and keys in one that was written out, its reach, and its bias."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...attention.calls import SDPA, AttentionCall
from ...attention.masks import admits, plain_mask
from ...errors import refusal
from ...head import Head
from .explain import alike, tolerance
from .watch import BY_NAME, QueryKeyProduct

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


def is_all_within(call: AttentionCall, lookback: int | None, lookahead: int | None) -> bool:
    """Tell whether each query sees all keys within its reach: of its text, and but for padding, which no query sees."""
    *_, num_queries, num_keys = shape = (*call.query.shape[:3], call.key.shape[2])
    seen = [call.admitted(rows).expand(*shape[:2], -1, num_keys) for rows in _blocks(shape)]
    is_key = torch.stack([part.any(-2) for part in seen]).any(0).any(1)[:, None, None]
    for rows, part in zip(_blocks(shape), seen, strict=True):
        distance = (torch.arange(num_queries)[rows, None] - torch.arange(num_keys)).to(part.device)
        wanted = is_key & part.any(-1, keepdim=True)
        wanted = wanted if lookback is None else wanted & (distance <= lookback)
        wanted = wanted if lookahead is None else wanted & (distance >= -lookahead)
        if call.segments is not None:
            queries, keys = call.segments
            wanted = wanted & (queries[:, rows, None] == keys[:, None])[:, None]
        if not torch.equal(wanted.expand_as(part), part):
            return False
    return True


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


# --------------------------------------------------------------------------------------- attention that was written out
def of_scores(call: AttentionCall, products: Sequence[QueryKeyProduct]) -> AttentionCall:
    """The call as a kernel would get it; refused where no product of two tensors gives its logits."""
    assert call.logits is not None
    logits = call.logits.detach()
    admitted, allowed = admits(logits), tolerance(logits.dtype)
    for scores in reversed(products):
        own, columns = scores.y.detach().double(), scores.y.shape[-1]
        if own.numel() != logits[..., :columns].numel() or logits.shape[-1] - columns not in (0, 1):
            continue
        seen, theirs = admitted[..., :columns], logits[..., :columns].double()
        own = own.reshape(theirs.shape)
        # Where none is above 0, the model may have subtracted its largest logit from all.
        is_shifted = bool((logits.masked_fill(~admitted, -torch.inf).amax(-1) <= 1e-6).all())
        sides = [without_mean(side, seen) if is_shifted else side for side in (own, theirs)]
        found = next(_scales(sides[0][seen], sides[1][seen], allowed, scores.is_capped), None)
        if found is not None:
            scale, softcap = found
            query, key = scores.query.detach(), scores.key.detach()
            parts = dict(query=query, key=key, value=key, attn_mask=seen, scale=scale, through=SDPA)
            return call.changed(**parts, softcap=softcap, sinks=_sinks(logits, scale * own - theirs, seen, allowed))
    raise refusal(
        "a softmax of products of queries and keys, scaled or capped",
        "other logits",
        f"call scaled_dot_product_attention, or {BY_NAME}",
    )


def _sinks(logits: Tensor, shift: Tensor, seen: Tensor, allowed: float) -> Tensor | None:
    """The logit of each head in a column after the keys, shifted back as all others were; None for no column."""
    if logits.shape[-1] == seen.shape[-1]:
        return None
    column = logits[..., -1] + shift.masked_fill(~seen, 0).sum(-1) / seen.sum(-1).clamp(min=1)
    sinks = column.movedim(-2, 0).flatten(1)
    if not alike(sinks, sinks[:, :1].expand_as(sinks), allowed):
        raise refusal("a sink of one logit for each head", "a further column of other numbers")
    return sinks[:, 0].to(logits)


def largest_gap(head: Head, own: Tensor, theirs: Tensor, admitted: Tensor) -> float:
    """Largest difference of the admitted logits of a head, its sink's included, from those of a call.

    Softmax does not see a number per query: some models subtract their largest logit, some count ALiBi from key 0.
    """
    if head.sink is not None and theirs.shape[-1] > own.shape[-1]:  # the sink is one more key
        own = torch.cat([own, head.sink.to(own).expand(*own.shape[:-1], 1)], -1)
    gap = own - theirs
    return min(float(one[admitted].abs().max()) for one in (gap, without_mean(gap, admitted)))


def without_mean(logits: Tensor, admitted: Tensor) -> Tensor:
    """Take off each query's mean over the keys that it may see, of which softmax knows nothing."""
    return logits - logits.masked_fill(~admitted, 0).sum(-1, keepdim=True) / admitted.sum(-1, keepdim=True).clamp(min=1)


def _scales(own: Tensor, theirs: Tensor, allowed: float, is_capped: bool) -> Iterator[tuple[float, float | None]]:
    """The factor from products to logits and the soft-cap, None for none."""
    if not len(own) or not bool(own.any()):
        return
    if not is_capped and (factor := _factor(own, theirs, allowed)) is not None:
        yield factor, None
    for cap in _caps(own, theirs) if is_capped else ():
        # Logits so small that twice the cap gives them too do not tell it, and a wrong one would be read as proven.
        factors = [_factor(own, theirs, allowed, one) for one in (cap, 2 * cap)]
        if factors[0] is not None and factors[1] is None:
            yield factors[0], cap


def _factor(own: Tensor, theirs: Tensor, allowed: float, cap: float = math.inf) -> float | None:
    """The factor that gives the logits, fitted where the cap leaves them room."""
    is_free = theirs.abs() < 0.9 * cap
    straight = theirs if cap == math.inf else cap * torch.atanh(theirs / cap)
    part, straight = own[is_free], straight[is_free]
    if not bool(part.any()):
        return None
    factor = float((part @ straight) / (part @ part))
    short = float(f"{factor:.4g}")
    factor = short if math.isclose(short, factor, rel_tol=1e-6) else factor
    made = own * factor if cap == math.inf else cap * torch.tanh(own * factor / cap)
    return factor if alike(made, theirs, allowed) else None


def _caps(own: Tensor, theirs: Tensor) -> list[float]:
    """Caps c for which c·atanh(logit/c) is to products alike for a large and a middling logit; short numbers first."""
    largest = float(theirs.abs().max())
    pair = [int((theirs.abs() - part * largest).abs().argmin()) for part in (0.3, 0.8)]
    products, logits = own[pair].abs(), theirs[pair].abs()
    low, high = largest, 1e4 * largest
    for _ in range(100):
        middle = math.sqrt(low * high)
        ratios = torch.atanh(logits / middle) / products
        low, high = (middle, high) if ratios[1] > ratios[0] else (low, middle)
    return [cap for digits in (1, 2, 3, 9) if (cap := float(f"{low:.{digits}g}")) >= largest * (1 - 1e-6)]
