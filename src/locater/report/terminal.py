"""Curves, sparklines and heat maps drawn with characters, for a terminal of any width."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from ..errors import bad_value
from ..quantities import quantity
from ..records import JsonMapping
from .views import all_shown, mean_of_known, views_of

EIGHTHS = " ▁▂▃▄▅▆▇█"
SHADES = ".:-=+*#%@"
LABEL = 4  # columns for the numbers of a line's layers, or more
MOST_HEADS = 65_536  # of a layer; a spoiled number would ask for a map of that width
MOST_LAYERS = 64
SCALE = 9  # steps of the scale beneath
# From dark to bright, and from orange over grey to blue: distinguishable without red and green.
SEQUENTIAL = ((28, 39, 51), (33, 90, 128), (59, 154, 166), (165, 212, 147), (253, 243, 196))
DIVERGING = ((255, 170, 90), (170, 95, 30), (58, 62, 70), (47, 121, 179), (155, 214, 255))


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


def sparkline(values: Sequence[float], *, width: int = 8) -> str:
    """A course in one line, from its lowest to its highest; at most `width` letters, the mean of what shares one.

    >>> sparkline([9, 3, 1, 0])
    '█▃▂▁'
    >>> sparkline([2, 2]), sparkline([1.7e308, 0])
    ('▄▄', '█▁')
    """
    count = min(width, len(values))
    edges = [round(number * len(values) / count) for number in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in zip(edges, edges[1:], strict=False)]
    low, high = min(means, default=0), max(means, default=0)
    if high == low:
        return EIGHTHS[4] * count
    return "".join(EIGHTHS[1 + round(7 * ((value - low) / (high - low)))] for value in means)


def _width(numbers: Iterable[int]) -> int:
    """Columns of a map whose heads have these numbers."""
    width = 1 + max(numbers)
    if width > MOST_HEADS:
        raise bad_value(f"numbers of heads below {MOST_HEADS:,}", f"{width - 1:,}")
    return width


@dataclass(frozen=True)
class HeatMap:
    """Layers downwards, heads to the right, on a terminal: half blocks in colour, else shades; nothing in a pipe."""

    title: str
    labels: Sequence[str]
    cells: Sequence[Sequence[float | None]]
    diverging: bool = False
    span: tuple[float, float] | None = None  # of the scale, where maps are to be compared; by default their own

    @classmethod
    def of(cls, document: JsonMapping, name: str) -> "HeatMap":
        """One quantity of a document's last frame."""
        view = views_of([all_shown(document)])[0]
        layers = list(dict.fromkeys(key[:2] for key in view.heads))
        cells: list[list[float | None]] = [[None] * _width(key[2] for key in view.heads) for _ in layers]
        for key, value in zip(view.heads, view.columns[name][-1], strict=True):
            cells[layers.index(key[:2])][key[2]] = value
        of = quantity(name)
        title = f"{of.symbol}, {of.words} (layers ↓, heads →)"
        return cls(title, [str(layer) for _, layer in layers], cells, of.scale == "diverging")

    @classmethod
    def of_heads(cls, heads: Sequence[JsonMapping], name: str, *, whose: str, span: tuple[float, float]) -> "HeatMap":
        """One quantity of heads that say their layer and number."""
        known = {(head["layer"], head["head"]): head[name] for head in heads}
        layers, width = sorted({layer for layer, _ in known}), _width(number for _, number in known)
        cells = [[known.get((layer, number)) for number in range(width)] for layer in layers]
        of = quantity(name)
        title = f"{whose}: {of.symbol}, {of.words} (layers ↓, heads →)"
        return cls(title, [str(layer) for layer in layers], cells, span=span)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not console.is_terminal:
            return
        margin = max(LABEL, 2 * max(map(len, self.labels)) + 1)
        room = options.max_width - margin - 2
        columns = _merge([*zip(*self.cells, strict=True)], room)  # heads, then layers beyond what a screen holds
        cells = _merge([*zip(*columns, strict=True)], MOST_LAYERS)
        every, heads = -(-len(self.cells) // len(cells)), -(-len(self.cells[0]) // len(columns))
        known = [value for row in cells for value in row if value is not None]
        if not known:
            return
        low, high = self.span or (min(known), max(known))
        if self.diverging:
            low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
        shares = [[None if v is None else (v - low) / (high - low or 1) for v in row] for row in cells]
        wide = 2 if 2 * len(cells[0]) <= room else 1
        yield Text(self.title, style="dim")
        in_colour = bool(console.color_system) and not console.no_color and console.encoding.lower().startswith("utf")
        labels = [f"{label:>{margin}} " for label in _spans(self.labels, 2 * every if in_colour else every)]
        yield Text(" " * (margin + 1) + _numbers(len(columns), wide, heads), style="dim")
        if in_colour:
            yield from self._blocks(shares, labels, wide)
        else:
            for label, row in zip(labels, shares, strict=True):
                yield Text(label + "".join(_shade(share) * wide for share in row))
        scale = Text(f"{'':>{margin}} {low:.3g} ")
        for step in range(SCALE):
            share = step / (SCALE - 1)
            scale.append("█" if in_colour else _shade(share), Style(color=self._colour(share)) if in_colour else "")
        yield scale.append(f" {high:.3g}")
        cell = f"the mean of {heads} heads in {every} layers" if max(heads, every) > 1 else "a head of a layer"
        yield Text(f"{'':>{margin}} {'half a block' if in_colour else 'a letter'}, {wide} wide, is {cell}", style="dim")

    def _blocks(self, shares: list[list[float | None]], labels: Sequence[str], wide: int) -> Iterator[Text]:
        """Two layers in a line: the upper half of each letter, and its ground."""
        for number in range(0, len(shares), 2):
            line = Text(labels[number // 2])
            below = shares[number + 1] if number + 1 < len(shares) else [None] * len(shares[number])
            for upper, lower in zip(shares[number], below, strict=True):
                line.append("▀" * wide, Style(color=self._colour(upper), bgcolor=self._colour(lower)))
            yield line

    def _colour(self, share: float | None) -> str:
        if share is None:
            return "default"
        stops = DIVERGING if self.diverging else SEQUENTIAL
        place = share * (len(stops) - 1)
        below = min(int(place), len(stops) - 2)
        pairs = zip(stops[below], stops[below + 1], strict=True)
        return "#" + "".join(f"{round(low + (place - below) * (high - low)):02x}" for low, high in pairs)


def _shade(share: float | None) -> str:
    return " " if share is None else SHADES[min(len(SHADES) - 1, int(share * len(SHADES)))]


def _spans(labels: Sequence[str], each: int) -> list[str]:
    """Name the layers of each line.

    >>> _spans(["0", "1", "2"], 2)
    ['0-1', '2']
    """
    groups = (labels[start : start + each] for start in range(0, len(labels), each))
    return [f"{group[0]}-{group[-1]}" if len(group) > 1 else group[0] for group in groups]


def _numbers(count: int, wide: int, each: int) -> str:
    """Number the heads over their columns, as many as have room.

    >>> _numbers(3, 2, 1), _numbers(13, 1, 1)
    ('0 1 2', '0  3  6  9')
    """
    longest = len(str(each * (count - 1)))
    step = -(-(longest + 1) // wide)
    fitting = (column for column in range(0, count, step) if column * wide + longest <= count * wide)
    return "".join(f"{each * column:<{step * wide}}" for column in fitting).rstrip()


def _merge(rows: Sequence[Sequence[float | None]], room: int) -> list[tuple[float | None, ...]]:
    """Average neighbouring rows where there is no room for each."""
    each = -(-len(rows) // max(1, room))
    groups = (rows[start : start + each] for start in range(0, len(rows), each))
    return [tuple(mean_of_known(column) for column in zip(*group, strict=True)) for group in groups]
