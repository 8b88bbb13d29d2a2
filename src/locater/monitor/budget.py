"""How much may be looked at: a bound on logits per report, spent by sampling queries."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from ..head import Head

LEAST_QUERIES = 16
LEAST_SHARE = 1 / 64  # of a layer's budget; below, a pass is not looked at


@dataclass
class Budget:
    """`total` logits for all layers together; each pass of a layer may spend half of what the layer has left.

    A count and not a time, so that all processes thin alike and a run can be repeated.
    """

    total: float
    num_layers: int
    spent: Counter[Hashable] = field(default_factory=Counter)
    skipped: Counter[Hashable] = field(default_factory=Counter)

    def num_queries(self, layer: Hashable, heads: Sequence[Head], shape: tuple[int, int, int]) -> int:
        """How many queries of each text to look at, given texts, queries and keys; 0 to leave the pass alone."""
        num_texts, num_queries, num_keys = shape
        share = self.total / self.num_layers
        left = share - self.spent[layer]
        if left < share * LEAST_SHARE:
            self.skipped[layer] += 1
            return 0
        price = num_texts * len(heads) * keys_per_query(heads[0], num_keys)
        wanted = min(num_queries, max(LEAST_QUERIES, int(left / 2 / price)))
        self.spent[layer] += round(wanted * price)
        return wanted


def keys_per_query(head: Head, num_keys: int) -> float:
    """About how many keys a query sees: half of them if it looks back only, a window's at most."""
    seen = num_keys / 2 if head.lookahead == 0 else num_keys
    if head.lookback is not None:
        seen = min(seen, head.lookback + 1 + (num_keys if head.lookahead is None else head.lookahead))
    return max(1.0, seen)
