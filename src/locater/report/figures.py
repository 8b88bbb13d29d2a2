"""Pictures of results, from plain documents; needs matplotlib and no torch."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import counted, import_extra, refusal
from ..quantities import LOCALIZED, REGIME_WORDS, quantity
from ..records import Json, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
# Colours that stay apart in print and for colour-blind readers: after Okabe and Ito, without their yellow, pale
# on white. Six colours and five dashes: lines of one colour differ in the other.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ((0, ()), (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (9, 3)))


def save(figure: "Figure", path: Path) -> None:
    """PNG, SVG or PDF by the suffix."""
    if path.suffix.lower() not in SUFFIXES:
        raise refusal("a picture ending in " + ", ".join(SUFFIXES), path.name)
    write(path, lambda temporary: figure.savefig(temporary, dpi=160, bbox_inches="tight"))


def escape(name: str) -> str:
    """Escape the dollar signs, which would begin a formula."""
    return name.replace("$", r"\$")


def draw_profile(document: Json) -> "Figure":
    """ρ_t over t, a line per method; Monte Carlo as a band of two standard errors."""
    figure, (panel,) = canvas(1, size=(7.2, 3.8))
    length, lines = document["length"], {}
    for name, values in document["profiles"].items():
        if name == "monte-carlo":
            pairs = list(zip(values["mean"], values["standard_error"], strict=True))
            low, high = ([mean + sign * 2 * error for mean, error in pairs] for sign in (-1, 1))
            label = "Monte Carlo (± 2 s.e.)"
            panel.fill_between(range(1, length + 1), low, high, color="#444444", alpha=0.25, lw=0, label=label)
        else:
            lines[f"{name} form" if name == "closed" else name] = (range(1, length + 1), values)
    title = (
        f"{document['regime']}   ξ = {document['xi']:.3g}   trace/λ = {document['trace'] / document['temperature']:.3g}"
        f"   localisation {document['localisation']:.2f}"
    )
    for (label, (x, y)), colour, dash in zip(lines.items(), COLOURS, DASHES, strict=False):
        panel.plot(x, y, lw=1.8, label=label, color=colour, linestyle=dash)
    panel.set(ylim=(-0.02, 1.02), xlim=(1, max(2, length)), xlabel="token t", ylabel="propagation probability ρ")
    panel.set_title(title, loc="left", fontsize=10)
    panel.legend(frameon=False, fontsize=8)
    return figure


def draw_phase_diagram(document: Json) -> "Figure":
    """Two panels of theory above two of measurement, over the same plane."""
    figure, axes = canvas(4, size=(10, 7.6))
    _draw_regimes(axes[0], document["regime"])
    axes[0].invert_yaxis()
    axes[0].set_title("Theory: regime", loc="left", fontsize=10)
    panels = (
        (axes[1], "localisation", "Theory: localisation", "viridis", 1.0),
        (axes[2], "normalised_entropy", "Softmax layer: entropy (0 = entropy collapse)", "magma", 1.0),
        (axes[3], "rank_residual", "Softmax layer: rank residual (0 = rank collapse)", "magma", 1.0),
    )
    for panel, key, title, colours, top in panels:
        image = panel.imshow(document[key], origin="lower", aspect="auto", cmap=colours, vmin=0, vmax=top)
        panel.set_title(title, loc="left", fontsize=10)
        figure.colorbar(image, ax=panel, fraction=0.046, pad=0.02)
    for panel in axes:
        _draw_outline(panel, document)
        _label_plane(panel, document)
    _draw_independent_border(axes[2], document)
    words = "Left and right of the white lines the theory says: localized (early, middle or late)"
    figure.suptitle(words, fontsize=11)
    figure.tight_layout()
    return figure


def _draw_regimes(panel: "Axes", regimes: Sequence[Sequence[str]]) -> None:
    """Draw a map of regimes in their colours, with a legend of those that occur."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    names = list(REGIME_WORDS)
    numbers = [[names.index(regime) for regime in row] for row in regimes]
    colours = ListedColormap([word.colour for word in REGIME_WORDS.values()])
    panel.imshow(numbers, aspect="auto", cmap=colours, vmin=-0.5, vmax=len(names) - 0.5)
    present = [name for name in names if any(name in row for row in regimes)]
    handles = [Patch(color=REGIME_WORDS[name].colour, label=name) for name in present]
    panel.legend(handles=handles, fontsize=7, loc="upper center", ncols=3, framealpha=0.9)


def _draw_outline(panel: "Axes", document: Json) -> None:
    """Around what the theory calls localized, out to the edges; dark beneath white, to be seen on any colour."""
    inside = [[float(regime in LOCALIZED) for regime in row] for row in document["regime"]]
    wider = [[row[0], *row, row[-1]] for row in [inside[0], *inside, inside[-1]]]
    x, y = ([-0.5, *range(count), count - 0.5] for count in (len(inside[0]), len(inside)))
    for colour, width in (("#222222", 3.2), ("white", 1.5)):
        panel.contour(x, y, wider, levels=[0.5], colors=colour, linewidths=width)


def _draw_independent_border(panel: "Axes", document: Json) -> None:
    """A dashed line where independent tokens, unlike the walk's, would lose their entropy."""
    if "independent_tokens" not in document:
        return
    border, deviations = document["independent_tokens"]["collapse_deviation"], document["deviation_over_temperature"]
    height = _place(deviations, border)
    panel.axhline(height, color="white", linestyle="--", linewidth=1.2)
    words = "independent tokens: collapse above"
    middle = len(document["trace_over_temperature"]) / 2
    panel.text(middle, height - 0.15, words, color="white", fontsize=7, va="top", ha="center")


def _label_plane(panel: "Axes", document: Json) -> None:
    """Round ticks, at their place between the points. Along x equal steps are equal factors but for the innermost."""
    traces, deviations = document["trace_over_temperature"], document["deviation_over_temperature"]
    columns = [one for one in (-1, -0.1, -0.01, 0, 0.01, 0.1, 1) if traces[0] <= one <= traces[-1]]
    rows = [one for one in (0.01, 0.1, 1) if deviations[0] <= one <= deviations[-1]]
    panel.set_xticks([_place(traces, one) for one in columns], [f"{one:g}".replace("-", "−") for one in columns])
    panel.set_yticks([_place(deviations, one) for one in rows], [f"{one:g}" for one in rows])
    zero = traces.index(0.0)
    for bend in (zero - 1, zero + 1):
        panel.axvline(bend, color="#888888", lw=0.8, ls=":")
    label = f"eigenvalue mean, as tr W/λ (by factors; linear between the dots at ±{traces[zero + 1]:.2g})"
    panel.tick_params(labelsize=8)
    panel.set_xlabel(label, fontsize=8)
    panel.set_ylabel("eigenvalue deviation, as √d·σ/λ", fontsize=8)


def _place(points: list[float], value: float) -> float:
    """Place a value between points that are spaced by factors of one sign, or linearly around zero."""
    above = next((number for number, point in enumerate(points) if point >= value - 1e-12), len(points) - 1)
    if above == 0 or points[above] == value:
        return float(above)
    low, high = points[above - 1], points[above]
    if low * high > 0:
        low, high, value = (math.log(abs(one)) for one in (low, high, value))
    return above - 1 + (value - low) / (high - low)


def draw_prediction(document: Json) -> "Figure":
    """Four panels, predicted over measured, coloured by layer; on the diagonal the prediction is right."""
    figure, axes = canvas(4, size=(9.6, 8.4))
    figure.set_layout_engine("constrained")
    points = None
    for panel, (name, rho) in zip(axes, document["spearman"].items(), strict=True):
        points = _scatter(panel, document, name)
        words = "" if rho is None else f", Spearman {rho:.2f}"
        panel.set_title(f"{quantity(name).words.capitalize()}{words}", loc="left", fontsize=10)
    assert points is not None, "there are numbers, so there is a panel"
    figure.colorbar(points, ax=axes, label="layer", fraction=0.03)
    tokens = document["tokens"]
    figure.suptitle(
        f"{counted(len(document['heads']), 'head')}, predicted from {tokens['calibration']:,} tokens, "
        f"measured on {tokens['test']:,} others",
        fontsize=11,
    )
    return figure


def _scatter(panel: "Axes", document: Json, name: str) -> "PathCollection":
    """Draw one quantity of all heads, predicted over measured."""
    heads = document["heads"]
    predicted, measured = ([head[side][name] for head in heads] for side in ("predicted", "measured"))
    top = max(*predicted, *measured) if name == "mean_distance" else 1.0
    panel.plot([0, top], [0, top], color="#999999", lw=1, ls="--")
    panel.set(xlabel="measured", ylabel="predicted")
    return panel.scatter(measured, predicted, c=[head["layer"] for head in heads], cmap="viridis", s=14)


def canvas(panels: int, *, size: tuple[float, float]) -> "tuple[Figure, list[Axes]]":
    """Empty axes, in two rows from four on, else side by side."""
    figure: Figure = import_extra("matplotlib.figure", "matplotlib, for pictures", extra="plot").Figure(figsize=size)
    grid = figure.subplots(2, (panels + 1) // 2) if panels >= 4 else figure.subplots(1, panels)
    axes = list(grid.flat) if panels > 1 else [grid]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes
