"""Maps, heads and curves as matplotlib figures, from the same views as the page; needs no torch."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import refusal
from ..theory.words import REGIMES, WORDS
from .curves import curves
from .figures import canvas, save
from .quantities import Quantity, quantity
from .text import all_shown
from .views import Document, View, views_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAPS = ("xi", "eta_over_temperature", "localisation", "symmetry", "near_mass", "normalised_entropy", "moved")
PROFILE_WORDS = {"closed": "closed form", "exact": "exact", "positions": "closed form, with positions"}
LINES = ("#0072B2", "#D55E00", "#009E73")


def plot(document: Document, name: str | None = None, *, head: tuple[int, int] | None = None) -> "Figure":
    """The map of one quantity (ξ unless named), or one head by layer and number."""
    (view,) = views_of([all_shown(document)]) or [None]
    if view is None:
        return curves(document)
    if head is not None:
        return head_figure(view, head)
    return map_figure(view, name or next((one for one in MAPS if one in view.columns), next(iter(view.columns))))


def save_all(documents: Sequence[Document], folder: Path) -> None:
    """Every map of every view, and the curves of runs, each as PNG and SVG."""
    figures: dict[str, Figure] = {}
    for view in views_of([all_shown(document) for document in documents]):
        for name in view.columns:
            if quantity(name).low != "low":  # those that the table of quantities knows
                figures[f"{view.name}-{name}"] = map_figure(view, name)
    for document in documents:
        if document["schema"] == "locater.runs/1":
            figures["runs"] = curves(document)
    for title, figure in figures.items():
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", title).strip("-.")[:100] or "figure"
        for suffix in (".png", ".svg"):
            save(figure, folder / f"{stem}{suffix}")


def map_figure(view: View, name: str) -> "Figure":
    """Layers downwards, heads to the right; the last frame."""
    if name not in view.columns and name != "regime":
        raise refusal(f"one of {', '.join(view.columns)}", name)
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

    colours = ListedColormap([word.colour for word in WORDS.values()])
    panel.imshow(cells, aspect="auto", cmap=colours, vmin=-0.5, vmax=len(WORDS) - 0.5)
    handles = [Patch(color=word.colour, label=name) for name, word in WORDS.items()]
    panel.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def head_figure(view: View, head: tuple[int, int]) -> "Figure":
    """Eigenvalues in the complex plane beside ρ over the context, as far as the document has them."""
    number = next((n for n, key in enumerate(view.heads) if key[1:] == tuple(head)), None)
    if number is None or not view.records:
        raise refusal("a head (layer, number) of this result", head)
    record = view.records[number]
    if not record.get("eigenvalues") and not record.get("profiles"):
        raise refusal("a scan with eigenvalues or curves", "neither", "scan with eigenvalues=True, curves=True")
    figure, (left, right) = canvas(2, size=(9.5, 4))
    if values := record.get("eigenvalues"):
        left.scatter([value[0] for value in values], [value[1] for value in values], s=14, color=LINES[0], alpha=0.7)
        left.axvline(sum(value[0] for value in values) / len(values), color=LINES[1], ls="--", lw=1, label="mean")
        left.legend(frameon=False)
    left.set(xlabel="real part", ylabel="imaginary part", title="eigenvalues")
    for (name, line), colour in zip((record.get("profiles") or {}).items(), LINES, strict=False):
        steps = range(len(line))
        right.plot([step / max(1, len(line) - 1) for step in steps], line, color=colour, label=PROFILE_WORDS[name])
    right.set(xlabel="position in the context (0 first, 1 the query)", ylabel="ρ", ylim=(-0.02, 1.02))
    right.set_title("which tokens are heard")
    if record.get("profiles"):
        right.legend(frameon=False)
    return figure
