"""How well predictions and measurements of the same heads agree."""

import math
from collections.abc import Sequence


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, equal values sharing the mean of theirs.

    >>> ranks([3.0, 1.0, 3.0])
    [2.5, 1.0, 2.5]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    found, start = [0.0] * len(values), 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for place in order[start:stop]:
            found[place] = (start + 1 + stop) / 2
        start = stop
    return found


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """The correlation of the ranks; None where one side does not vary.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0])
    0.5
    """
    left, right = ranks(predicted), ranks(measured)
    middle = (len(left) + 1) / 2
    left, right = [rank - middle for rank in left], [rank - middle for rank in right]
    size = math.sqrt(sum(a * a for a in left) * sum(b * b for b in right))
    return sum(a * b for a, b in zip(left, right, strict=True)) / size if size else None


def mean_absolute_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(predicted, measured, strict=True)) / len(predicted)


def bias(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Predicted less measured, on average."""
    return sum(a - b for a, b in zip(predicted, measured, strict=True)) / len(predicted)
