"""`HeadBatch`: heads of one shape and kind, which are computed together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby

from jaxtyping import Float
from torch import Tensor

from ..head import Head
from ..positions import Distance, added_by_distance
from ..projections import Projection

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
    for (_, size), alike in groupby(_groups(heads), lambda group: (group[0], len(group[1]))):
        groups = [group for _, group in alike]
        at_once = max(1, GRAM_ENTRIES // (size * groups[0][0].d_head ** 2))
        at_once = min(at_once, -(-len(groups) // parts))
        for start in range(0, len(groups), at_once):
            yield HeadBatch(tuple(chain.from_iterable(groups[start : start + at_once])), size)


def _groups(heads: Sequence[Head]) -> Iterator[tuple[list[object], list[Head]]]:
    """The heads of one kind that share a key, as many as the buffer holds; and that kind."""
    for (*kind, _), shared in groupby(heads, _kind_and_key):
        group = list(shared)
        at_once = max(1, BUFFER_BYTES // (4 * group[0].query.weight.numel()) - 1)
        for begin in range(0, len(group), at_once):
            yield kind, group[begin : begin + at_once]


def _kind_and_key(head: Head) -> list[object]:
    """All in which heads may differ but numbers, for one computation serves heads of one kind; and which key it is."""
    bias, bounds = head.position_bias, (head.softcap, head.lookback, head.lookahead, head.turns_first)
    kind = [head.rotary, head.layer, head.block, head.scale, None if bias is None else bias.kind, bounds]
    for side in (head.query, head.key):
        low, norms = side.low_rank, [side.norm]
        if low is not None:
            kind, norms = [*kind, id(low.down)], [side.norm, low.norm]
        kind += side.weight.shape, side.weight.dtype, id(side.input_norm), id(side.whole), side.bias is None
        for norm in norms:
            kind.append(None if norm is None else (norm.kind, norm.epsilon, norm.gain is None, norm.bias is None))
    return [*kind, id(head.key)]
