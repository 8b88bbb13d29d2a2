"""Read attention that was written out: which product of queries and keys a softmax was given, scaled and capped."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...attention.calls import SDPA, AttentionCall
from ...attention.masks import admits
from ...errors import refusal
from .explain import alike, tolerance
from .watch import QueryKeyProduct


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
        sides = [_without_mean(side, seen) if _is_shifted(logits, admitted) else side for side in (own, theirs)]
        found = next(_scales(sides[0][seen], sides[1][seen], allowed, scores.is_capped), None)
        if found is not None:
            scale, softcap = found
            query, key = scores.query.detach(), scores.key.detach()
            parts = dict(query=query, key=key, value=key, attn_mask=seen, scale=scale, through=SDPA)
            return call.changed(**parts, softcap=softcap, sinks=_sinks(logits, scale * own - theirs, seen, allowed))
    raise refusal(
        "a softmax of products of queries and keys, scaled or capped",
        "other logits",
        "call scaled_dot_product_attention, or name the projections by heads=…",
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


def _is_shifted(logits: Tensor, admitted: Tensor) -> bool:
    """Tell whether a model subtracts its largest logit from all."""
    return bool((logits.masked_fill(~admitted, -torch.inf).amax(-1) <= 1e-6).all())


def _without_mean(logits: Tensor, admitted: Tensor) -> Tensor:
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
