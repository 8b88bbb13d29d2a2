"""Cutting attention into blocks: which the mask excludes, which it admits whole, which lie near the diagonal."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from .masks import Mask


@dataclass(frozen=True)
class KeyBlock:
    """One block of keys for one block of queries.

    `masked`: some key is not admitted. `side`: +1 if all keys lie before the queries (or level), −1 if behind;
    0 where keys are on both sides or near, so that distances must be looked at one by one.
    """

    keys: slice
    masked: bool
    side: int


class Extent:
    """The smallest and the largest value of a stretch of columns, over the whole batch."""

    def __init__(self, values: Tensor):
        values = values.cpu()
        self.low: list[int] = values.amin(0).tolist()
        self.high: list[int] = values.amax(0).tolist()
        self.ascends = bool((values.diff(dim=-1) >= 0).all())

    def __len__(self) -> int:
        return len(self.low)

    def over(self, columns: slice) -> tuple[int, int]:
        if self.ascends:
            return self.low[columns.start], self.high[columns.stop - 1]
        return min(self.low[columns]), max(self.high[columns])


class Plan:
    """Asks the mask about blocks; positions and segments are brought to the CPU once, O(T) of them."""

    def __init__(self, mask: Mask, *, near: int, key_block: int):
        assert mask.query_positions is not None and mask.key_positions is not None
        self.mask, self.near, self.key_block = mask, near, key_block
        self.queries, self.keys = Extent(mask.query_positions), Extent(mask.key_positions)
        both = (mask.query_segments, mask.key_segments)
        self.segments = None if both[0] is None or both[1] is None else (Extent(both[0]), Extent(both[1]))
        self.valid = None if mask.key_valid is None else Extent(mask.key_valid.int())
        self.spans = None if mask.begin is None or mask.last is None else (Extent(mask.begin), Extent(mask.last))

    def key_blocks(self, queries: slice) -> Iterator[KeyBlock]:
        """The blocks of keys that some query of this block may see."""
        begin, stop = self._span(queries)
        cuts = {min(max(edge, begin), stop) for edge in self._edges(*self.queries.over(queries))}
        edges = sorted(cuts | {begin, stop})
        for start, stop in zip(edges, edges[1:], strict=False):
            num_pieces = -(-(stop - start) // self.key_block)
            cuts = [start + (stop - start) * piece // num_pieces for piece in range(num_pieces + 1)]
            for keys in map(slice, cuts, cuts[1:]):
                admitted, masked = self._admits(queries, keys)
                if admitted:
                    yield KeyBlock(keys, masked, self._side(queries, keys))

    def _span(self, queries: slice) -> tuple[int, int]:
        """From the first key that any of these queries sees to behind the last."""
        if self.spans is None:
            return 0, len(self.keys)
        begin, stop = self.spans[0].over(queries)[0], self.spans[1].over(queries)[1] + 1
        return min(begin, max(stop, 0)), max(stop, 0)

    def _edges(self, low: int, high: int) -> set[int]:
        """Cuts where the mask or nearness changes if positions ascend; where they do not, any cut is as right."""
        back, ahead, near, positions = self.mask.lookback, self.mask.lookahead, self.near, self.keys.low
        edges = {0, len(self.keys), bisect_right(positions, low - near)}
        if ahead is None or ahead >= near:
            edges.add(bisect_left(positions, high + near))
        if ahead is not None:
            edges.add(bisect_right(positions, high + ahead))
            edges |= {bisect_right(positions, low + ahead)} if ahead >= near else set()
        if back is not None:
            edges |= {bisect_left(positions, low - back), bisect_left(positions, high - back)}
        return edges

    def _admits(self, queries: slice, keys: slice) -> tuple[bool, bool]:
        """Tell whether any pair may be admitted, and whether some pair may not be."""
        nearest, farthest = self._distances(queries, keys)
        back, ahead = self.mask.lookback, self.mask.lookahead
        masked = self.mask.dense is not None or self.mask.rule is not None
        if back is not None:
            if nearest > back:
                return False, True
            masked |= farthest > back
        if ahead is not None:
            if farthest < -ahead:
                return False, True
            masked |= nearest < -ahead
        if self.segments is not None:
            (first, last), (other_first, other_last) = self.segments[0].over(queries), self.segments[1].over(keys)
            if last < other_first or other_last < first:
                return False, True
            masked |= not first == last == other_first == other_last
        if self.valid is not None:
            fewest, most = self.valid.over(keys)
            if not most:
                return False, True
            masked |= not fewest
        return True, masked

    def _distances(self, queries: slice, keys: slice) -> tuple[int, int]:
        (low, high), (key_low, key_high) = self.queries.over(queries), self.keys.over(keys)
        return low - key_high, high - key_low

    def _side(self, queries: slice, keys: slice) -> int:
        nearest, farthest = self._distances(queries, keys)
        return 1 if nearest >= self.near else -1 if -farthest >= self.near else 0
