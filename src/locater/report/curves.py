"""A picture of runs over their steps, a line per arm; needs matplotlib and no torch."""

from typing import TYPE_CHECKING, Any

from ..records import Json
from .figures import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito, but for their yellow, which is pale on white; black is for the arm compared with.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BLACK = "#000000"
# Six colours, five dashes and seven markers: arms of one colour differ in the rest.
DASHES = ((0, ()), (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)), (0, (9, 3)))
MARKERS = "osD^vPX"
TITLES = {
    "perplexity": ("Perplexity on held-out text (lower is better)", "perplexity per token"),
    "loss": ("Loss on held-out data (lower is better)", "loss"),
    "entropy": ("How evenly attention is spread", "entropy (1 = all tokens alike)"),
    "trace_over_temperature": ("Sum of the query-key eigenvalues", "tr W / temperature λ, mean over heads"),
    "eta_over_temperature": ("Scale of the query-key eigenvalues", "η / temperature λ, mean over heads"),
    "xi": ("The one over the other", "ξ = tr W / η, mean over heads"),
}
LATE_FROM = 0.6  # of all steps: what the range of the score is chosen for
LOG_FROM = 3.0  # highest over lowest: from here on a logarithmic axis


def curves(document: Json) -> "Figure":
    """Six panels over the steps; a band of one standard error where an arm has several seeds."""
    figure, axes = canvas(6, size=(14.5, 7))
    figure.set_layout_engine("constrained")
    styles = _styles([arm["arm"] for arm in document["arms"]], document["against"])
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
        title = f"Training loss, minus that of {_plain(against)} on the same texts"
    panel.set_title(title, loc="left", fontsize=10)


def _draw(panel: "Axes", document: Json, curve_of: dict[str, dict], styles: dict[str, dict]) -> None:
    drawn = [(curve, styles[arm]) for arm, curve in curve_of.items()]
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
    label = f"{_plain(arm['arm'])} ({count} seed{'s' if count > 1 else ''})"
    return Line2D([], [], **style, lw=1.6, ms=4, label=label)


def _plain(name: str) -> str:
    """A dollar sign would begin a formula."""
    return name.replace("$", r"\$")
