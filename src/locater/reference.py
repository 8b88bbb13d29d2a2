"""Models that were measured on text, as a small table: how many heads do what, to tell what is unusual beside them.

reference.json is written by `python runs/studies.py evidence` from the rows behind docs/evidence.md. Needs no torch.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FEWEST_MODELS = 3
FEWEST_HEADS = 16  # of which a share means something
BEYOND = 0.1  # of the heads, outside of what the reference models have, to be called unusual


class Unusual(NamedTuple):
    """A word, the share of heads that it holds for, and the least and largest share among the reference models."""

    word: str
    share: float
    low: float
    high: float
    models: int


@cache
def reference_table() -> dict[str, Any]:
    """The counts by model: `block`, `heads`, and the number of heads for which each word holds."""
    return json.loads((Path(__file__).parent / "reference.json").read_text(encoding="utf-8"))


def unusual(blocks: set[str], num_heads: int, counts: Mapping[str, int]) -> list[Unusual]:
    """List the words whose share is far outside of that of the reference models with such blocks, the farthest first.

    >>> unusual({"encoder"}, 100, {"first token": 70})[0].high
    0.0
    >>> unusual({"encoder"}, 100, {"first token": 5})
    []
    """
    models = [one for one in reference_table().values() if {one["block"]} == blocks]
    if len(models) < FEWEST_MODELS or num_heads < FEWEST_HEADS:
        return []
    found = []
    for word, count in counts.items():
        shares = [one[word] / one["heads"] for one in models]
        one = Unusual(word, count / num_heads, min(shares), max(shares), len(models))
        if max(one.low - one.share, one.share - one.high) > BEYOND:
            found.append(one)
    return sorted(found, key=lambda one: -max(one.low - one.share, one.share - one.high))
