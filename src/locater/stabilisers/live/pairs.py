"""`Pair`: the queries and keys of one attention module, as a batch of heads that is read from the live weights."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor, nn

from ...errors import Refusal, refusal
from ...head import Block, Head
from ...models import Family, Layer
from ...models.live import layers
from ...models.live.explicit import Explicit
from ...models.live.watch import Sample
from ...positions import Rotary
from .weights import Markers, Rows


@dataclass(frozen=True)
class Pair:
    """Query heads (groups, heads, d_h, d) and their keys (groups, 1, d_h, d); `first` is the first head's index."""

    block: Block
    layer: int
    first: int
    query: Rows
    key: Rows
    temperature: float
    d_model: int
    rotary: Rotary | None = None

    @property
    def sides(self) -> tuple[Rows, Rows]:
        return self.query, self.key

    @property
    def is_fused(self) -> bool:
        return self.query.weight.identity == self.key.weight.identity

    @property
    def is_stored(self) -> bool:
        """Whether both weights are parameters themselves."""
        return self.query.weight.is_stored and self.key.weight.is_stored

    @property
    def is_grouped(self) -> bool:
        return self.query.num_heads > 1

    @property
    def shape(self) -> tuple[int, int]:
        """Groups, and query heads in each."""
        return self.query.num_groups, self.query.num_heads

    @property
    def name(self) -> str:
        return f"{self.block} layer {self.layer} ({self.query.weight.name})"

    def weights(self) -> tuple[Tensor, ...]:
        """What the heads are made from, once each: one tensor if fused, else two."""
        query = self.query.weight.read()
        return (query,) if self.is_fused else (query, self.key.weight.read())


def find_pairs(
    model: nn.Module,
    *,
    heads: Sequence[Explicit] = (),
    sample: Sample | None = None,
    family: Family | None = None,
    trained: bool = True,
    latent: bool = False,
) -> list[Pair]:
    """All pairs of a model, shared ones once. What is left out is said in a warning; nothing left is refused.

    `trained` leaves out heads whose query and key are both frozen, and those whose query is their key. `latent` takes
    in those whose weights are products, as `LatentPair`.
    """
    markers = Markers(model)
    skipped: list[str] = []
    found: dict[object, Pair] = {}
    for layer in layers(markers.model, heads=heads, sample=sample, family=family, tensors=markers):
        skipped += layer.refused
        for pair in _pairs_of(layer, markers, skipped, latent=latent):
            reason = _unfit(pair) if trained else None
            if reason:
                skipped.append(f"{pair.name}: {reason}")
            else:
                found.setdefault((pair.query.identity, pair.key.identity), pair)
    if not found:
        raise refusal(
            "attention heads to act on", skipped[0] if skipped else "none", "unfreeze or name some by heads=…"
        )
    if skipped:
        warnings.warn("left out: " + "; ".join(skipped), stacklevel=3)
    return list(found.values())


def check_stored(pairs: Sequence[Pair], what: str, remedy: str) -> None:
    """For what writes into weights: of computed ones (LoRA, a parametrisation) it would write into a copy."""
    for pair in pairs:
        if not all(rows.weight.is_stored for rows in pair.sides):
            raise refusal(f"plain parameters to {what}", f"computed weights in {pair.name}", remedy)


def _unfit(pair: Pair) -> str | None:
    if pair.query.identity == pair.key.identity:
        return "query and key are one weight"
    if not (pair.query.weight.is_trained or pair.key.weight.is_trained):
        return "query and key are frozen"
    return None


def _pairs_of(layer: Layer, markers: Markers, skipped: list[str], *, latent: bool) -> Iterator[Pair]:
    """A layer's heads as one pair; as several where their rows follow no single grid (CodeGen's four blocks)."""
    if any(head.query.low_rank or head.key.low_rank for head in layer.heads):
        from .latent import latent_pair  # a kind of pair, so it stands above this file

        if latent and (found := latent_pair(layer.heads, markers)) is not None:
            yield found
        else:
            skipped.append(f"{layer.block} layer {layer.number}: latent attention, whose weights are products")
        return
    groups = [tuple(group) for _, group in groupby(layer.heads, key=lambda head: head.key_index)]
    start = 0
    while start < len(groups):
        # The longest run of groups on one grid; a single group always is one.
        stop = next(n for n in range(len(groups), start, -1) if _pair(groups[start:n], markers) is not None)
        pair = _pair(groups[start:stop], markers)
        assert pair is not None
        yield pair
        start = stop


def _pair(groups: Sequence[tuple[Head, ...]], markers: Markers) -> Pair | None:
    head = groups[0][0]
    query = one_grid([[one.query.weight for one in group] for group in groups], markers)
    key = one_grid([[group[0].key.weight] for group in groups], markers)
    if query is None or key is None:
        if len(groups) > 1:
            return None
        raise Refusal(f"{head.block} layer {head.layer}: its heads lie on no grid of rows")
    return Pair(head.block, head.layer, head.index, query, key, head.temperature, head.d_model, head.rotary)


def one_grid(weights: list[list[Tensor]], markers: Markers) -> Rows | None:
    """The one grid of rows on which all slices lie, or None."""
    located = [[markers.locate(weight) for weight in group] for group in weights]
    weight, first, transposed = located[0][0]
    head_step = located[0][1][1] - first if len(located[0]) > 1 else 0
    group_step = located[1][0][1] - first if len(located) > 1 else len(located[0]) * weights[0][0].shape[0]
    expected = [
        [(weight, first + g * group_step + h * head_step, transposed) for h in range(len(located[0]))]
        for g in range(len(located))
    ]
    if located != expected:
        return None
    d_head = weights[0][0].shape[0]
    return Rows(weight, transposed, d_head, len(located), len(located[0]), first, group_step, head_step)
