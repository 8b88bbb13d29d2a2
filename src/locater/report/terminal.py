"""A curve drawn with characters, for a terminal of any width."""

from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"


def draw(values: Sequence[float], *, width: int = 64, height: int = 8) -> str:
    """Columns of eighth blocks over [0, 1]: the average of the values that share a column, or columns repeated.

    >>> print(draw([0, 0.5, 1], width=7, height=2))
    1 ┤    ██
    0 ┤  ████
    """
    repeat = max(1, width // len(values))
    width = min(width, len(values))
    edges = [round(column * len(values) / width) for column in range(width + 1)]
    spans = zip(edges, edges[1:], strict=False)
    columns = [sum(values[low:high]) / (high - low) for low, high in spans for _ in range(repeat)]
    rows = []
    for level in reversed(range(height)):
        cells = (min(8, max(0, round((value * height - level) * 8))) for value in columns)
        label = "1" if level == height - 1 else "0" if level == 0 else " "
        rows.append(f"{label} ┤" + "".join(EIGHTHS[cell] for cell in cells))
    return "\n".join(rows)
