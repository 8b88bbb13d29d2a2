"""Pairs of a live model, found once, through the same tables as a scan."""

import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import nn

from ...errors import Refusal, refusal, within
from ...models import AttentionModule, HeadRows, read_heads, slices
from ...models.live import open_live
from ...models.live.modules import Explicit
from ...models.live.tensors import ModuleTensors
from ...models.live.watch import Sample
from ...models.slices import Latent, has_qk_norm, logit_scale, num_columns
from .pairs import Inner, Pair
from .weights import find_rows, find_weight

NORM = "qk_norm"  # the name of what our own QKNorm adds to a module
NORMED = "QK-norm after the weights undoes their scale"
INSTEAD = "the norm bounds the logits; decay its gains, where it has any, to lower the bound"


def find_pairs(
    model: nn.Module,
    *,
    heads: Sequence[Explicit] = (),
    sample: Sample | None = None,
    trained: bool = True,
    latent: bool = False,
    by_scale: bool = False,
) -> list[Pair]:
    """All pairs of a model, shared ones once. What is left out is said in a warning; nothing left is refused.

    `trained` leaves out heads whose query and key are both frozen, and those whose query is their key. `latent` takes
    in those whose weights are products. `by_scale` leaves out those behind QK-norm, for what acts by
    the scale of the weights: the norm undoes it.
    """
    tensors, skipped = ModuleTensors(model), []
    pairs: dict[object, Pair] = {}
    for site in open_live(tensors.model, heads=heads, sample=sample, tensors=tensors).sites:
        if site.reason is not None:
            skipped += read_heads(site).refused
            continue
        for pair in _pairs_of(site, tensors, skipped, latent=latent):
            is_bounded = has_qk_norm(site) or NORM in pair.query.weight.attention._modules
            reason = NORMED if by_scale and is_bounded else _unfit(pair) if trained else None
            if reason:
                skipped.append(f"{pair.name}: {reason}")
            else:
                pairs.setdefault((pair.query.identity, pair.key.identity), pair)
    if not pairs:
        remedy = INSTEAD if skipped and NORMED in skipped[0] else "unfreeze or name some by heads=…"
        raise refusal("attention heads to act on", skipped[0] if skipped else "none", remedy)
    if skipped:
        warnings.warn("left out: " + "; ".join(skipped), stacklevel=3)
    return list(pairs.values())


def _unfit(pair: Pair) -> str | None:
    if pair.query.identity == pair.key.identity:
        return "query and key are one weight"
    if not (pair.query.weight.is_trained or pair.key.weight.is_trained):
        return "query and key are frozen"
    return None


def _pairs_of(module: AttentionModule, tensors: ModuleTensors, skipped: list[str], *, latent: bool) -> Iterator[Pair]:
    """A module's heads as one pair; as several where their rows follow no single grid (CodeGen's four blocks)."""
    place, heads = module.place, slices(module)
    widths = [num_columns(module, side) for side in (heads[0].query, heads[0].key)]
    if widths[0] != widths[1]:
        skipped.append(f"{place}: queries and keys of different widths, {widths[0]} and {widths[1]}")
    elif any(rows.query.latent or rows.key.latent for rows in heads):
        if latent and (pair := _latent_pair(module, heads, tensors)) is not None:
            yield pair
        else:
            skipped.append(f"{place}: latent attention, whose weights are products")
    else:
        groups = [list(group) for _, group in groupby(heads, key=lambda rows: rows.key)]
        while groups:
            # The longest run of groups on one grid; a single group always is one.
            runs = ((size, _pair(module, groups[:size], tensors)) for size in range(len(groups), 0, -1))
            size, pair = next((run for run in runs if run[1] is not None), (0, None))
            if pair is None:
                raise Refusal(f"{place}: its heads lie on no grid of rows")
            yield pair
            groups = groups[size:]


def _pair(
    module: AttentionModule, groups: Sequence[Sequence[HeadRows]], tensors: ModuleTensors, *inner: Inner | None
) -> Pair | None:
    query = find_rows([[rows.query for rows in group] for group in groups], tensors, module.caller)
    key = find_rows([[group[0].key] for group in groups], tensors, module.caller)
    if query is None or key is None:
        return None
    first = groups[0][0]
    with within(module.place):
        numbers = 1 / logit_scale(module), num_columns(module, first.query)
    return Pair(module.block, module.number, first.head, query, key, *numbers, *inner)


def _latent_pair(module: AttentionModule, heads: Sequence[HeadRows], tensors: ModuleTensors) -> Pair | None:
    """The heads of a layer of latent attention; None where they are made in another way than `Pair` knows."""
    head = heads[0]
    inner = [None if side.latent is None else _inner(side.latent, tensors) for side in (head.key, head.query)]
    if has_qk_norm(module) or inner[0] is None or (inner[1] is None) != (head.query.latent is None):
        return None
    return _pair(module, [[rows] for rows in heads], tensors, *inner)


def _inner(latent: Latent, tensors: ModuleTensors) -> Inner | None:
    norm = latent.norm
    if latent.down.transposed or (norm is not None and (norm.plus_one or norm.times != 1)):
        return None
    gain = None if latent.gain is None else find_weight(tensors, latent.gain)
    return Inner(find_weight(tensors, latent.down.parameter), gain, latent.down.count)
