"""`HeadBatch`: heads of one shape and kind, which are computed together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from jaxtyping import Float
from torch import Tensor

from ..head import Head
from ..positions import Distance, added_by_distance
from ..projections import Norm, Projection

# Weights held in float32 at a time, and entries of each kind of Gram matrix analysed together.
BUFFER_BYTES = 16 * 2**20
GRAM_ENTRIES = 2**20


@dataclass(frozen=True, eq=False)
class HeadBatch:
    """`per_group` heads after each other share a key, and all groups are of one size.

    Sizes, norms, scale, positions and bounds are the same for all, so `first` stands for them; weights, biases, gains
    and what distance adds are each head's own.
    """

    heads: tuple[Head, ...]
    per_group: int = 1

    def __len__(self) -> int:
        return len(self.heads)

    @cached_property
    def first(self) -> Head:
        return self.heads[0]

    @cached_property
    def num_groups(self) -> int:
        return len(self.heads) // self.per_group

    @cached_property
    def queries(self) -> list[Projection]:
        return [head.query for head in self.heads]

    @cached_property
    def keys(self) -> list[Projection]:
        """One for each group."""
        return [head.key for head in self.heads[:: self.per_group]]

    @cached_property
    def is_linear(self) -> bool:
        """True if the weights alone make queries and keys: no norm after them."""
        return self.first.query.is_linear and self.first.key.is_linear

    def anywhere(self) -> "HeadBatch":
        """See `Head.anywhere`."""
        return replace(self, heads=tuple(map(Head.anywhere, self.heads))) if self.first.turns_first else self

    def added_by_distance(self, distance: Distance) -> Float[Tensor, "heads ..."] | None:
        """Compute the position bias of each head's logits; None where there is none."""
        biases = [head.position_bias for head in self.heads if head.position_bias is not None]
        return added_by_distance(biases, distance) if biases else None

    def singles(self) -> Iterator["HeadBatch"]:
        """Each head as a batch of its own."""
        return (HeadBatch((head,)) for head in self.heads)


def batches(heads: Sequence[Head], *, parts: int = 1) -> Iterator[HeadBatch]:
    """Split heads into batches, in order, each as large as the budget allows and its heads are of one kind.

    With `parts`, no batch holds more than that share of the groups.
    """
    alike: list[Sequence[Head]] = []
    for group in _groups(heads):
        if alike and not (len(group) == len(alike[0]) and _are_alike(alike[0][0], group[0])):
            yield from _within_budget(alike, parts)
            alike = []
        alike.append(group)
    yield from _within_budget(alike, parts)


def _within_budget(groups: list[Sequence[Head]], parts: int) -> Iterator[HeadBatch]:
    if groups:
        at_once = max(1, GRAM_ENTRIES // (len(groups[0]) * groups[0][0].d_head ** 2))
        at_once = min(at_once, -(-len(groups) // parts))
        for start in range(0, len(groups), at_once):
            yield HeadBatch(tuple(chain.from_iterable(groups[start : start + at_once])), len(groups[0]))


def _groups(heads: Sequence[Head]) -> list[Sequence[Head]]:
    """The heads of one kind that share a key, as many as the buffer holds."""
    start, groups = 0, []
    for stop in range(1, len(heads) + 1):
        if stop < len(heads) and heads[stop].key is heads[start].key and _are_alike(heads[start], heads[stop]):
            continue
        at_once = max(1, BUFFER_BYTES // (4 * heads[start].query.weight.numel()) - 1)
        for begin in range(start, stop, at_once):
            groups.append(heads[begin : min(stop, begin + at_once)])
        start = stop
    return groups


def _are_alike(one: Head, other: Head) -> bool:
    """Tell whether two heads differ in nothing but numbers, so that one computation serves both."""
    a, b = one.position_bias, other.position_bias
    if not (
        (one.rotary is other.rotary or one.rotary == other.rotary)
        and (one.layer, one.block, one.scale, one.softcap) == (other.layer, other.block, other.scale, other.softcap)
        and (one.lookback, one.lookahead) == (other.lookback, other.lookahead)
        and one.turns_first == other.turns_first
        and (a is b or (a is not None and b is not None and a.kind == b.kind))
    ):
        return False
    for mine, theirs in ((one.query, other.query), (one.key, other.key)):
        c, d = mine.low_rank, theirs.low_rank
        if mine is not theirs and not (
            (mine.weight.shape, mine.weight.dtype) == (theirs.weight.shape, theirs.weight.dtype)
            and mine.input_norm is theirs.input_norm
            and mine.whole is theirs.whole
            and (mine.bias is None) == (theirs.bias is None)
            and (mine.norm is theirs.norm or _are_alike_norms(mine.norm, theirs.norm))
            and (c is d or (c is not None and d is not None and c.down is d.down and _are_alike_norms(c.norm, d.norm)))
        ):
            return False
    return True


def _are_alike_norms(one: Norm | None, other: Norm | None) -> bool:
    if one is None or other is None:
        return one is other
    shapes = (one.gain is None, one.bias is None) == (other.gain is None, other.bias is None)
    return shapes and (one.kind, one.epsilon) == (other.kind, other.epsilon)
