"""The figure of a study, from its document alone; needs matplotlib and no torch."""

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..records import Json
from .figures import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 6
# Colours that stay apart in print and for colour-blind readers (after Okabe and Ito); then the same with dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
DASHES = ("-", "--", ":")
FEW = 6  # more names than these stand beside the axes, not on them


def study_figure(document: Json) -> "Figure":
    """Lines of means over x, one for each value of `by`, or intervals by name; a panel for each value of `panel`."""
    spec, rows = document["figure"], document["rows"]
    panels = list(dict.fromkeys(row.get(spec["panel"]) for row in rows))[:MOST_PANELS]
    draw = _intervals if spec.get("kind") == "intervals" else _lines
    figure, axes = canvas(len(panels), size=_size(rows, spec, len(panels)))
    names = list(dict.fromkeys(row[spec["by"]] for row in rows))
    for one, panel in zip(axes, panels, strict=False):
        draw(one, [row for row in rows if row.get(spec["panel"]) == panel], spec, names)
        if panel is not None and spec["panel"]:
            label = spec.get("panel_label") or ""
            one.set_title(f"{label} {_word(panel)}".strip(), loc="left", fontsize=9)
    for one in axes[len(panels) :]:
        one.set_visible(False)
    if draw is _lines:
        _legend(figure, axes[0], names, spec)
    figure.tight_layout()
    return figure


def _size(rows: Sequence[Json], spec: Json, count: int) -> tuple[float, float]:
    """Intervals need a line for each name."""
    across, down = ((count + 1) // 2, 2) if count >= 4 else (count, 1)
    if spec.get("kind") == "intervals":
        panels = dict.fromkeys(row.get(spec["panel"]) for row in rows)
        lines = max(sum(row.get(spec["panel"]) == panel for row in rows) for panel in panels)
        return 4.6 * across, (1.0 + 0.24 * lines) * down
    return 3.6 * across + 0.8, 3.1 * down


def _legend(figure: "Figure", axes: "Axes", names: Sequence[object], spec: Json) -> None:
    """On the first panel while few, to the right of all otherwise."""
    options = dict(frameon=False, fontsize=7, title=spec.get("by_label") or None, title_fontsize=7)
    handles, labels = axes.get_legend_handles_labels()
    if len(names) <= FEW and not spec.get("panel"):
        axes.legend(**options)
    else:
        figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), **options)


def _lines(axes: "Axes", rows: Sequence[Json], spec: Json, names: Sequence[object]) -> None:
    for number, name in enumerate(names):
        line: dict[object, list[float]] = {}
        for row in rows:
            if row[spec["by"]] == name and row.get(spec["y"]) is not None and row.get(spec["x"]) is not None:
                line.setdefault(row[spec["x"]], []).append(row[spec["y"]])
        points = [(x, fmean(values)) for x, values in line.items()]
        if not any(isinstance(x, str) for x, _ in points):
            points.sort()
        look: dict[str, Any] = dict(color=COLOURS[number % len(COLOURS)], label=_word(name), marker=".")
        style = "" if spec.get("kind") == "points" else DASHES[number // len(COLOURS) % len(DASHES)]
        axes.plot(*(zip(*points, strict=True) if points else ((), ())), linestyle=style or "none", lw=1.2, **look)
    if spec["logarithmic"]:
        axes.set_xscale("log")
    if spec.get("level") is not None:
        axes.axhline(spec["level"], color="#999999", lw=0.8, ls="--")
    axes.set(xlabel=spec["x_label"] or spec["x"], ylabel=spec["y_label"] or spec["y"])
    axes.tick_params(labelsize=7)


def _intervals(axes: "Axes", rows: Sequence[Json], spec: Json, names: Sequence[object]) -> None:
    """A dot and a bar for each name, from top to bottom; dark where the interval leaves out zero."""
    here = {row[spec["by"]] for row in rows}
    names = [name for name in names if name in here]
    for row in rows:
        place, value = -names.index(row[spec["by"]]), row[spec["x"]]
        if value is None:
            continue
        colour = COLOURS[0] if row.get("seen") else "#999999"
        if row["low"] is not None and row["high"] is not None:
            axes.plot((row["low"], row["high"]), (place, place), color=colour, lw=1.5)
        axes.plot(value, place, marker="o", markersize=4, color=colour)
    axes.axvline(0, color="#444444", lw=0.8, ls=":")
    axes.set_yticks([-number for number in range(len(names))], [_word(name) for name in names])
    axes.set(xlabel=spec["x_label"] or spec["x"], ylim=(-len(names) + 0.4, 0.6))
    axes.tick_params(labelsize=7)


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
