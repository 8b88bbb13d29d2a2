"""Maps and curves over time as matplotlib figures, from the same views as the page; needs no torch."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import refusal
from ..quantities import Quantity, quantity
from .curves import curves, study_figure
from .figures import canvas, draw_phase_diagram, draw_prediction, draw_profile, draw_regimes, escape
from .reading import RUNS, STUDY
from .views import Document, View, all_shown, mean_of_known, views_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAPS = ("xi", "eta_over_temperature", "localisation", "symmetry", "near_mass", "normalised_entropy", "moved")
MOST_LAYERS = 12  # that a legend can name
DRAWN: dict[str, Callable[[Document], "Figure"]] = {
    "locater.theory/1": draw_profile,
    "locater.phase-diagram/1": draw_phase_diagram,
    "locater.predict/2": draw_prediction,
    RUNS: curves,
    STUDY: study_figure,
}


def draw_result(document: Document) -> "Figure":
    """The one picture of a whole result, as `--plot` has it."""
    return DRAWN[document["schema"]](document)


def plot(document: Document, name: str | None = None, *, over_time: bool = False) -> "Figure":
    """The map of one quantity (ξ unless named), or its curves over steps or checkpoints."""
    (view,) = views_of([all_shown(document)]) or [None]
    if view is None:
        return draw_result(document)
    name = name or next((one for one in MAPS if one in view.columns), next(iter(view.columns)))
    if name != "regime" and name not in view.columns:
        raise refusal(f"one of {', '.join(view.columns)}", name)
    if not over_time:
        return _map_figure(view, name)
    if len(view.frames) < 2:
        raise refusal("several steps or checkpoints, for curves over time", "one")
    return _layer_curves(view, name)


def _layer_curves(view: View, name: str) -> "Figure":
    """A quantity over steps or checkpoints, the mean of each layer's heads; alarms as dotted lines."""
    figure, (panel,) = canvas(1, size=(7.6, 4.2))
    from matplotlib import colormaps

    layers = list(dict.fromkeys(key[:2] for key in view.heads))
    numbered = all(frame.isdigit() for frame in view.frames)
    steps = [int(frame) for frame in view.frames] if numbered else list(range(len(view.frames)))
    for number, layer in enumerate(layers):
        rows = [n for n, key in enumerate(view.heads) if key[:2] == layer]
        known = [mean_of_known([frame[n] for n in rows]) for frame in view.columns[name]]
        means = [math.nan if mean is None else mean for mean in known]
        colour = colormaps["viridis"](0.85 * number / max(1, len(layers) - 1))
        panel.plot(steps, means, color=colour, lw=1.6, label=f"{layer[0]} {layer[1]}")
    for step in {alarm["step"] for alarm in view.alarms} & set(steps):
        panel.axvline(step, color="#9a3d00", lw=1, ls=":")
    if not numbered:
        panel.set_xticks(steps, [escape(frame) for frame in view.frames])
    of = quantity(name)
    panel.set(xlabel="training step" if numbered else "model", ylabel=f"{of.symbol}: {of.words}")
    panel.set_title(escape(f"{view.name}, mean of each layer"), loc="left", fontsize=10)
    if len(layers) <= MOST_LAYERS:
        panel.legend(frameon=False, fontsize=8)
    return figure


def _map_figure(view: View, name: str) -> "Figure":
    """Layers downwards, heads to the right; the last frame."""
    layers = list(dict.fromkeys(key[:2] for key in view.heads))
    width = max(key[2] for key in view.heads) + 1
    figure, (panel,) = canvas(1, size=(min(12, 2.5 + 0.4 * width), min(12, 1.6 + 0.24 * len(layers))))
    cells: list[list[Any]] = [[None] * width for _ in layers]
    for key, value in zip(view.heads, view.regimes[-1] if name == "regime" else view.columns[name][-1], strict=True):
        cells[layers.index(key[:2])][key[2]] = value
    if name == "regime":
        draw_regimes(panel, cells, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    else:
        _draw_values(figure, panel, cells, quantity(name))
    several = len({block for block, _ in layers}) > 1
    every = max(1, len(layers) // 16)
    names = [f"{block} {layer}" if several else str(layer) for block, layer in layers]
    panel.set_yticks(range(0, len(layers), every), names[::every])
    panel.set(xlabel="head", ylabel="layer")
    panel.set_title(escape(view.name), loc="left", fontsize=10)
    return figure


def _draw_values(figure: "Figure", panel: "Axes", cells: list[list[float | None]], of: Quantity) -> None:
    known = sorted(value for row in cells for value in row if value is not None)
    low, high = known[int(0.01 * (len(known) - 1))], known[int(0.99 * (len(known) - 1))]
    options: dict[str, Any] = dict(cmap="YlGnBu", vmin=low, vmax=high)
    if of.scale == "diverging":
        far = max(abs(low), abs(high)) or 1
        options = dict(cmap="PuOr", vmin=-far, vmax=far)
    if of.scale == "share":
        options |= dict(vmin=0, vmax=1)
    numbers = [[float("nan") if value is None else value for value in row] for row in cells]
    image = panel.imshow(numbers, aspect="auto", interpolation="nearest", **options)
    bar = figure.colorbar(image, ax=panel, pad=0.02)
    bar.set_label(f"{of.symbol}: {of.words}\nlow: {of.low}; high: {of.high}", fontsize=8)
