"""Maps, heads and curves as matplotlib figures, from the same views as the page; needs no torch."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import refusal
from ..quantities import QUANTITIES, REGIME_WORDS, REGIMES, Quantity, is_shown, quantity
from .curves import curves, study_figure
from .figures import canvas, colormaps, save
from .head_panels import head_figure
from .views import Document, View, all_shown, views_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAPS = ("xi", "eta_over_temperature", "localisation", "symmetry", "near_mass", "normalised_entropy", "moved")
MOST_LAYERS = 12  # that a legend can name


def plot(
    document: Document, name: str | None = None, *, head: tuple[int, int] | None = None, over_time: bool = False
) -> "Figure":
    """The map of one quantity (ξ unless named), its curves over steps or checkpoints, or one head (layer, number)."""
    (view,) = views_of([all_shown(document)]) or [None]
    if view is None:
        return curves(document)
    if head is not None:
        return head_figure(view, head)
    name = name or next((one for one in MAPS if one in view.columns), next(iter(view.columns)))
    if over_time:
        if len(view.frames) < 2:
            raise refusal("several steps or checkpoints, for curves over time", "one")
        return _layer_curves(view, _check_column(view, name))
    return _map_figure(view, name)


def save_all(documents: Sequence[Document], folder: Path) -> None:
    """Every map and all curves over time, each as PNG and SVG."""
    for title, figure in _all(documents):
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", title).strip("-.")[:100] or "figure"
        for suffix in (".png", ".svg"):
            save(figure, folder / f"{stem}{suffix}")


def _all(documents: Sequence[Document]) -> "Iterator[tuple[str, Figure]]":
    """One after the other: hundreds of figures at once would fill the memory."""
    for view in views_of([all_shown(document) for document in documents]):
        for name in view.columns:
            if name in QUANTITIES and is_shown(name, view.columns):
                yield f"{view.name}-{name}", _map_figure(view, name)
                if len(view.frames) > 1:
                    yield f"{view.name}-{name}-over-time", _layer_curves(view, name)
        if any(regime for regime in view.regimes[-1]):
            yield f"{view.name}-regime", _map_figure(view, "regime")
    for document in map(all_shown, documents):
        if document["schema"] == "locater.runs/1":
            yield "runs", curves(document)
        if document["schema"] == "locater.study/1" and document["rows"]:
            yield f"study-{document.get('study', '')}", study_figure(document)


def _layer_curves(view: View, name: str) -> "Figure":
    """A quantity over steps or checkpoints, the mean of each layer's heads; alarms as dotted lines."""
    figure, (panel,) = canvas(1, size=(7.6, 4.2))
    layers = list(dict.fromkeys(key[:2] for key in view.heads))
    numbered = all(frame.isdigit() for frame in view.frames)
    steps = [int(frame) for frame in view.frames] if numbered else list(range(len(view.frames)))
    colours = colormaps()["viridis"]
    for number, layer in enumerate(layers):
        rows = [n for n, key in enumerate(view.heads) if key[:2] == layer]
        means = [_mean([frame[n] for n in rows]) for frame in view.columns[name]]
        panel.plot(
            steps, means, color=colours(0.85 * number / max(1, len(layers) - 1)), lw=1.6, label=f"{layer[0]} {layer[1]}"
        )
    for step in {alarm["step"] for alarm in view.alarms} & set(steps):
        panel.axvline(step, color="#9a3d00", lw=1, ls=":")
    if not numbered:
        panel.set_xticks(steps, [frame.replace("$", r"\$") for frame in view.frames])
    of = quantity(name)
    panel.set(xlabel="training step" if numbered else "model", ylabel=f"{of.symbol}: {of.words}")
    panel.set_title(f"{view.name}, mean of each layer".replace("$", r"\$"), loc="left", fontsize=10)
    if len(layers) <= MOST_LAYERS:
        panel.legend(frameon=False, fontsize=8)
    return figure


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def _map_figure(view: View, name: str) -> "Figure":
    """Layers downwards, heads to the right; the last frame."""
    if name != "regime":
        _check_column(view, name)
    layers = list(dict.fromkeys(key[:2] for key in view.heads))
    width = max(key[2] for key in view.heads) + 1
    figure, (panel,) = canvas(1, size=(min(12, 2.5 + 0.4 * width), min(12, 1.6 + 0.24 * len(layers))))
    cells = [[float("nan")] * width for _ in layers]
    for key, value in zip(view.heads, _values(view, name), strict=True):
        cells[layers.index(key[:2])][key[2]] = float("nan") if value is None else value
    if name == "regime":
        _draw_regimes(panel, cells)
    else:
        _draw_values(figure, panel, cells, quantity(name))
    several = len({block for block, _ in layers}) > 1
    every = max(1, len(layers) // 16)
    names = [f"{block} {layer}" if several else str(layer) for block, layer in layers]
    panel.set_yticks(range(0, len(layers), every), names[::every])
    panel.set(xlabel="head", ylabel="layer")
    panel.set_title(view.name.replace("$", r"\$"), loc="left", fontsize=10)
    return figure


def _check_column(view: View, name: str) -> str:
    """Refuse a quantity that the view has no column for."""
    if name not in view.columns:
        raise refusal(f"one of {', '.join(view.columns)}", name)
    return name


def _values(view: View, name: str) -> list[float | None]:
    if name != "regime":
        return view.columns[name][-1]
    return [None if regime is None else float(REGIMES.index(regime)) for regime in view.regimes[-1]]


def _draw_values(figure: "Figure", panel: "Axes", cells: list[list[float]], of: Quantity) -> None:
    known = sorted(value for row in cells for value in row if value == value)
    low, high = known[int(0.01 * (len(known) - 1))], known[int(0.99 * (len(known) - 1))]
    options: dict[str, Any] = dict(cmap="YlGnBu", vmin=low, vmax=high)
    if of.scale == "diverging":
        far = max(abs(low), abs(high)) or 1
        options = dict(cmap="PuOr", vmin=-far, vmax=far)
    if of.scale == "share":
        options |= dict(vmin=0, vmax=1)
    image = panel.imshow(cells, aspect="auto", interpolation="nearest", **options)
    bar = figure.colorbar(image, ax=panel, pad=0.02)
    bar.set_label(f"{of.symbol}: {of.words}\nlow: {of.low}; high: {of.high}", fontsize=8)


def _draw_regimes(panel: "Axes", cells: list[list[float]]) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    colours = ListedColormap([word.colour for word in REGIME_WORDS.values()])
    panel.imshow(cells, aspect="auto", cmap=colours, vmin=-0.5, vmax=len(REGIME_WORDS) - 0.5)
    handles = [Patch(color=word.colour, label=name) for name, word in REGIME_WORDS.items()]
    panel.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
