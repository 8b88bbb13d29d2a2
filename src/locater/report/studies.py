"""The figure of a study, from its document alone; needs matplotlib and no torch."""

from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING

from ..records import Json
from .figures import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 6


def study_figure(document: Json) -> "Figure":
    """Lines of means over x, one for each value of `by`, a panel for each value of `panel`."""
    spec, rows = document["figure"], document["rows"]
    panels = list(dict.fromkeys(row.get(spec["panel"]) for row in rows))[:MOST_PANELS]
    figure, axes = canvas(len(panels), size=(3.4 * min(3, len(panels)) + 1, 3.2 * ((len(panels) + 2) // 3)))
    for one, panel in zip(axes, panels, strict=False):
        _panel(one, [row for row in rows if row.get(spec["panel"]) == panel], spec)
        if panel is not None:
            one.set_title(f"{spec['panel']} {panel}", loc="left", fontsize=9)
    axes[0].legend(frameon=False, fontsize=7, title=spec["by"], title_fontsize=7)
    return figure


def _panel(axes: "Axes", rows: list[Json], spec: Json) -> None:
    for name in dict.fromkeys(row[spec["by"]] for row in rows):
        line = [row for row in rows if row[spec["by"]] == name and spec["y"] in row and spec["x"] in row]
        if not line:
            continue
        if not isinstance(line[0][spec["x"]], str):
            line.sort(key=lambda row: row[spec["x"]])
        points = [(x, fmean(row[spec["y"]] for row in some)) for x, some in groupby(line, lambda row: row[spec["x"]])]
        axes.plot(*zip(*points, strict=True), marker=".", lw=1, label=str(name))
    if spec["logarithmic"]:
        axes.set_xscale("log")
    axes.set(xlabel=spec["x_label"] or spec["x"], ylabel=spec["y_label"] or spec["y"])
    axes.tick_params(labelsize=7)
