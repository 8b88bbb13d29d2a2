"""Maps, heads and curves over time as matplotlib figures, from the same views as the page; needs no torch."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import refusal
from ..quantities import QUANTITIES, Quantity, is_shown, quantity
from ..records import Json
from .curves import curves, study_figure
from .figures import (
    COLOURS,
    canvas,
    draw_lines,
    draw_phase_diagram,
    draw_prediction,
    draw_profile,
    draw_regimes,
    escape,
    save,
)
from .reading import RUNS, STUDY
from .views import Document, View, all_shown, mean_of_known, views_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAPS = ("xi", "eta_over_temperature", "localisation", "symmetry", "near_mass", "normalised_entropy", "moved")
MOST_LAYERS = 12  # that a legend can name
NAMES = {
    **{"closed": "closed form", "exact": "exact", "positions": "closed form, with positions"},
    **{"weights": "from the weights", "predicted": "predicted for the text", "measured": "measured on the text"},
}
DISTANCES = (0, 1, 4, 16, 64, 256, 1024, 4096)
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


def plot(
    document: Document, name: str | None = None, *, head: tuple[int, int] | None = None, over_time: bool = False
) -> "Figure":
    """The map of one quantity (ξ unless named), its curves over steps or checkpoints, or one head (layer, number)."""
    (view,) = views_of([all_shown(document)]) or [None]
    if view is None:
        return draw_result(document)
    if head is not None:
        return _head_figure(view, head)
    name = name or next((one for one in MAPS if one in view.columns), next(iter(view.columns)))
    if name != "regime" and name not in view.columns:
        raise refusal(f"one of {', '.join(view.columns)}", name)
    if not over_time:
        return _map_figure(view, name)
    if len(view.frames) < 2:
        raise refusal("several steps or checkpoints, for curves over time", "one")
    return _layer_curves(view, name)


def save_all(documents: Sequence[Document], folder: Path) -> None:
    """Every map and all curves over time, each as PNG and SVG."""
    for title, figure in _all(documents):
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", title).strip("-.")[:100] or "figure"
        for suffix in (".png", ".svg"):
            save(figure, folder / f"{stem}{suffix}")


def _all(documents: Sequence[Document]) -> "Iterator[tuple[str, Figure]]":
    """Yield one after the other: hundreds of figures at once would fill the memory."""
    for view in views_of([all_shown(document) for document in documents]):
        for name in view.columns:
            if name in QUANTITIES and is_shown(name, view.columns):
                yield f"{view.name}-{name}", _map_figure(view, name)
                if len(view.frames) > 1:
                    yield f"{view.name}-{name}-over-time", _layer_curves(view, name)
        if any(regime for regime in view.regimes[-1]):
            yield f"{view.name}-regime", _map_figure(view, "regime")
    for document in map(all_shown, documents):
        if document["schema"] == RUNS or (document["schema"] == STUDY and document["rows"]):
            yield "runs" if document["schema"] == RUNS else f"study-{document.get('study', '')}", draw_result(document)


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
        panel.plot(
            steps,
            [math.nan if mean is None else mean for mean in means],
            color=colour,
            lw=1.6,
            label=f"{layer[0]} {layer[1]}",
        )
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


def _head_figure(view: View, head: tuple[int, int]) -> "Figure":
    """Eigenvalues, ρ over the context, logit and attention over distance: as far as the document has them."""
    number = next((n for n, key in enumerate(view.heads) if key[1:] == tuple(head)), None)
    if number is None or not view.records:
        raise refusal("a head (layer, number) of this result", head)
    panels = list(_panels(view, view.records[number]))
    if not panels:
        raise refusal("a scan with eigenvalues or curves", "neither", "scan with details=['eigenvalues', 'curves']")
    figure, axes = canvas(len(panels), size=(9.4, 8) if len(panels) == 4 else (4.7 * len(panels), 4))
    for panel, draw in zip(axes, panels, strict=True):
        draw(panel)
    block, layer, index = view.heads[number]
    figure.suptitle(escape(f"{view.name}: head {block} {layer}.{index}"), fontsize=11)
    figure.set_layout_engine("constrained")
    return figure


def _panels(view: View, record: Json) -> "Iterator[Callable[[Axes], None]]":
    """Yield what draws each panel of a head, in the order of the page."""
    if eigenvalues := record.get("eigenvalues"):
        yield lambda panel: _draw_eigenvalues(panel, eigenvalues)
    if profiles := record.get("profiles"):
        yield lambda panel: _draw_profiles(panel, profiles, view.length or 1024)
    middles = [(low + high) / 2 for low, high in view.bins or ()]
    logits = {name: (view.distances or range(len(y)), y) for name, y in (record.get("expected_logits") or {}).items()}
    logits |= {name: (middles, y) for name, y in (record.get("logit_profile") or {}).items()}
    if logits:
        heading = "Logit over distance" if record.get("logit_profile") else "Expected logit over distance"
        yield lambda panel: _over_distance(panel, logits, heading, "logit ω, before softmax")
    if attention := {name: (middles, y) for name, y in (record.get("attention_profile") or {}).items()}:
        title = "Attention over distance, without the first token"
        yield lambda panel: _over_distance(panel, attention, title, "share of attention")


def _draw_eigenvalues(panel: "Axes", values: Sequence[Sequence[float]]) -> None:
    """The mean as a cross, the root of the mean squared distance from it as a circle."""
    from matplotlib.patches import Circle

    real, imaginary = ([value[part] for value in values] for part in (0, 1))
    mean = sum(real) / len(real)
    squares = [(re - mean) ** 2 + im**2 for re, im in zip(real, imaginary, strict=True)]
    radius = math.sqrt(sum(squares) / len(squares))
    panel.scatter(real, imaginary, s=14, color=COLOURS[0], alpha=0.7)
    panel.plot([mean], [0], "+", color=COLOURS[1], ms=12, mew=2, label=f"mean {mean:.3g}")
    panel.add_patch(Circle((mean, 0), radius, fill=False, color=COLOURS[1], ls="--", label=f"deviation {radius:.3g}"))
    panel.set_aspect("equal", adjustable="datalim")
    draw_lines(panel, {}, "Eigenvalues in the complex plane", xlabel="real part", ylabel="imaginary part")


def _draw_profiles(panel: "Axes", profiles: Mapping[str, Sequence[float]], length: int) -> None:
    lines = {
        NAMES.get(str(name), str(name)): ([1 + n * (length - 1) / max(1, len(y) - 1) for n in range(len(y))], y)
        for name, y in profiles.items()
    }
    labels = dict(xlabel="token t (the query is the last)", ylabel="probability ρ", ylim=(-0.02, 1.02))
    draw_lines(panel, lines, "Which tokens are heard", **labels)


def _over_distance(panel: "Axes", lines: Mapping[str, Any], title: str, label: str) -> None:
    """Draw lines over distance by factors, with zero as the first step."""
    panel.set_xscale("symlog", base=2, linthresh=1)
    named = {NAMES.get(str(name), str(name)): line for name, line in lines.items()}
    draw_lines(panel, named, title, xlabel="distance Δ in tokens", ylabel=label)
    kept = [tick for tick in DISTANCES if tick <= panel.get_xlim()[1]]
    panel.set_xticks(kept, [str(tick) for tick in kept])
    panel.set_xlim(0, None)
