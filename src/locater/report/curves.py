"""Pictures of runs over their steps, a line per arm, and of studies; and the one picture of any result.

Needs matplotlib and no torch.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..records import Json
from .figures import COLOURS, DASHES, canvas, draw_phase_diagram, draw_prediction, draw_profile, escape
from .reading import RUNS, STUDY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK = "#000000"  # of the arm compared with
MARKERS = "osD^vPX"  # seven, so that arms of one colour and dash differ in these
TITLES = {
    "perplexity": ("Perplexity on held-out text (lower is better)", "perplexity per token"),
    "loss": ("Loss on held-out data (lower is better)", "loss"),
    "entropy": ("How evenly attention is spread", "entropy (1 = all tokens alike)"),
    "trace_over_temperature": ("Sum of the query-key eigenvalues", "tr W / temperature λ, mean over heads"),
    "eta_over_temperature": ("Scale of the query-key matrix W", "η / temperature λ, mean over heads"),
    "xi": ("The one over the other", "ξ = tr W / η, mean over heads"),
}
LATE_FROM = 0.6  # of all steps: what the range of the score is chosen for
LOG_FROM = 3.0  # highest over lowest: from here on a logarithmic axis
MOST_PANELS = 6
STUDY_COLOURS = (*COLOURS, "#444444")  # then the same with dashes
FEW = 6  # more names than these stand beside the axes, not on them


def curves(document: Json, *, beside: Sequence[str] = ()) -> "Figure":
    """Six panels over the steps; a band of one standard error where an arm has several seeds.

    `beside`: the arms of a picture next to it, so that an arm looks the same in both.
    """
    figure, axes = canvas(6, size=(14.5, 7))
    figure.set_layout_engine("constrained")
    styles = _styles([*beside, *(arm["arm"] for arm in document["arms"])], document["against"])
    score = document["score"]
    names = [score, *(name for name in TITLES if name not in ("perplexity", "loss"))]
    for panel, name in zip([axes[0], *axes[2:]], names, strict=True):
        panel.set_title(TITLES[name][0], loc="left", fontsize=10)
        panel.set(xlabel="training step", ylabel=TITLES[name][1])
        curve_of = {arm["arm"]: arm["curves"][name] for arm in document["arms"] if name in arm["curves"]}
        _draw(panel, document, curve_of, styles)
    _training(axes[1], document, styles)
    if drawn := [arm["curves"][score] for arm in document["arms"] if score in arm["curves"]]:
        _focus(axes[0], drawn)
    handles = [_handle(arm, styles[arm["arm"]]) for arm in document["arms"]]
    legend: dict[str, Any] = dict(loc="outside right upper", frameon=False, fontsize=9, handlelength=4)
    figure.legend(handles=handles, title=f"best {score} first\n(step {document['step']})", **legend)
    if any(len(arm["seeds"]) > 1 for arm in document["arms"]):
        figure.suptitle("Means over seeds; bands: ± one standard error", fontsize=11)
    return figure


def _styles(arms: list[str], against: str | None) -> dict[str, dict[str, Any]]:
    """By name and not by rank, so that an arm looks the same at every step."""
    others = sorted(set(arms) - {against})
    found = {
        arm: dict(color=COLOURS[n % len(COLOURS)], linestyle=DASHES[n % len(DASHES)], marker=MARKERS[n % len(MARKERS)])
        for n, arm in enumerate(others)
    }
    return found | ({against: dict(color=BLACK, linestyle="-", marker=".")} if against is not None else {})


def _training(panel: "Axes", document: Json, styles: dict[str, dict[str, Any]]) -> None:
    """The loss, or better its difference to the arm compared with: on the same texts it is far quieter."""
    against = document["against"]
    kind = "loss" if against is None else "difference"
    curve_of = {arm["arm"]: arm["training"][kind] for arm in document["arms"] if kind in arm["training"]}
    _draw(panel, document, {arm: curve for arm, curve in curve_of.items() if curve["step"]}, styles)
    panel.set(xlabel="training step", ylabel="loss per token")
    title = "Training loss"
    if against is not None:
        panel.axhline(0, color=BLACK, lw=1.6)
        title = f"Training loss, minus that of {escape(against)} on the same texts"
    panel.set_title(title, loc="left", fontsize=10)


def _draw(panel: "Axes", document: Json, curve_of: dict[str, dict], styles: dict[str, dict]) -> None:
    drawn = [(curve, styles[arm]) for arm, curve in curve_of.items()]
    panel.locator_params(axis="x", nbins=5)  # more than five labels of five digits run into each other
    for curve, style in drawn:
        every = max(1, len(curve["step"]) // 8)
        panel.plot(curve["step"], curve["mean"], **style, lw=1.6, ms=4, markevery=every)
        if None not in curve["standard_error"]:
            pairs = list(zip(curve["mean"], curve["standard_error"], strict=True))
            low, high = ([mean + sign * error for mean, error in pairs] for sign in (-1, 1))
            panel.fill_between(curve["step"], low, high, color=style["color"], alpha=0.15, lw=0)
    if not drawn:
        panel.text(0.5, 0.5, "not measured in these runs", ha="center", va="center", transform=panel.transAxes)
    elif document["step"] < max(curve["step"][-1] for curve, _ in drawn):
        panel.axvline(document["step"], color="#999999", lw=1, ls=":")


def _focus(panel: "Axes", drawn: list[dict[str, list]]) -> None:
    """The range of the later steps: validations long before, far above, would press the end into one line."""
    points = [point for curve in drawn for point in zip(curve["step"], curve["mean"], strict=True)]
    *_, before, last = [0, *sorted({step for step, _ in points})]
    start = min(LATE_FROM * last, before)  # one point alone is no curve
    low, high = min(value for _, value in points), max(value for step, value in points if step >= start)
    if low > 0 and high > LOG_FROM * low:
        _logarithmic(panel)
        margin = (high / low) ** 0.05
        panel.set_ylim(low / margin, high * margin)
    elif high > low:
        margin = 0.06 * (high - low)
        panel.set_ylim(low - margin, high + margin)


def _logarithmic(panel: "Axes") -> None:
    """Plain numbers at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_locator(NullLocator())


def _handle(arm: Json, style: dict[str, Any]) -> Any:
    from matplotlib.lines import Line2D

    count = len(arm["seeds"])
    label = f"{escape(arm['arm'])} ({count} seed{'s' if count > 1 else ''})"
    return Line2D([], [], **style, lw=1.6, ms=4, label=label)


def study_figure(document: Json) -> "Figure":
    """Lines of means over x, one for each value of `by`, or intervals by name; a panel for each value of `panel`."""
    spec, rows = document["figure"], document["rows"]
    panels = list(dict.fromkeys(row.get(spec["panel"]) for row in rows))[:MOST_PANELS]
    draw = _intervals if spec.get("kind") == "intervals" else _lines
    figure, axes = canvas(len(panels), size=_study_size(rows, spec, len(panels)))
    names = list(dict.fromkeys(row[spec["by"]] for row in rows))
    for one, panel in zip(axes, panels, strict=False):
        draw(one, [row for row in rows if row.get(spec["panel"]) == panel], spec, names)
        if panel is not None and spec["panel"]:
            label = spec.get("panel_label") or ""
            one.set_title(f"{label} {_word(panel)}".strip(), loc="left", fontsize=9)
    for one in axes[len(panels) :]:
        one.set_visible(False)
    if draw is _lines:
        _study_legend(figure, axes[0], names, spec)
    figure.tight_layout()
    return figure


def _study_size(rows: Sequence[Json], spec: Json, count: int) -> tuple[float, float]:
    """Intervals need a line for each name."""
    across, down = ((count + 1) // 2, 2) if count >= 4 else (count, 1)
    if spec.get("kind") == "intervals":
        panels = dict.fromkeys(row.get(spec["panel"]) for row in rows)
        lines = max(sum(row.get(spec["panel"]) == panel for row in rows) for panel in panels)
        return 4.6 * across, (1.0 + 0.24 * lines) * down
    return 3.6 * across + 0.8, 3.1 * down


def _study_legend(figure: "Figure", axes: "Axes", names: Sequence[object], spec: Json) -> None:
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
        look: dict[str, Any] = dict(color=STUDY_COLOURS[number % len(STUDY_COLOURS)], label=_word(name), marker=".")
        style = "none" if spec.get("kind") == "points" else DASHES[number // len(STUDY_COLOURS) % len(DASHES)]
        axes.plot(*(zip(*points, strict=True) if points else ((), ())), linestyle=style, lw=1.2, **look)
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
        colour = STUDY_COLOURS[0] if row.get("seen") else "#999999"
        if row["low"] is not None and row["high"] is not None:
            axes.plot((row["low"], row["high"]), (place, place), color=colour, lw=1.5)
        axes.plot(value, place, marker="o", markersize=4, color=colour)
    axes.axvline(0, color="#444444", lw=0.8, ls=":")
    axes.set_yticks([-number for number in range(len(names))], [_word(name) for name in names])
    axes.set(xlabel=spec["x_label"] or spec["x"], ylim=(-len(names) + 0.4, 0.6))
    axes.tick_params(labelsize=7)


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


DRAWN: dict[str, Callable[[Json], "Figure"]] = {
    "locater.theory/1": draw_profile,
    "locater.phase-diagram/1": draw_phase_diagram,
    "locater.predict/2": draw_prediction,
    RUNS: curves,
    STUDY: study_figure,
}


def draw_result(document: Json) -> "Figure":
    """The one picture of a whole result, as `--plot` has it."""
    return DRAWN[document["schema"]](document)
