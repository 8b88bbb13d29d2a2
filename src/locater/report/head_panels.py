"""One head as a figure of up to four panels, the same as on the page; needs matplotlib and no torch."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import refusal
from ..records import Json
from .figures import canvas
from .views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROFILE_WORDS = {"closed": "closed form", "exact": "exact", "positions": "closed form, with positions"}
TEXT_WORDS = {"predicted": "predicted for the text", "measured": "measured on the text"}
LINES = ("#0072B2", "#D55E00", "#009E73")
DASHES = ("-", "--", ":")
Panel = Callable[["Axes", View, Json], None]


def head_figure(view: View, head: tuple[int, int]) -> "Figure":
    """Eigenvalues, ρ over the context, logit and attention over distance: as far as the document has them."""
    number = next((n for n, key in enumerate(view.heads) if key[1:] == tuple(head)), None)
    if number is None or not view.records:
        raise refusal("a head (layer, number) of this result", head)
    record = view.records[number]
    panels = [draw for name, draw in _PANELS.items() if record.get(name)]
    if not panels:
        raise refusal("a scan with eigenvalues or curves", "neither", "scan with details=['eigenvalues', 'curves']")
    # Five would be drawn in two rows: logits of a text join those of the weights.
    panels = list(dict.fromkeys(panels))
    figure, axes = canvas(
        len(panels), size=(4.7 * (2 if len(panels) == 4 else len(panels)), 8 if len(panels) == 4 else 4)
    )
    for axis, draw in zip(axes, panels, strict=True):
        draw(axis, view, record)
    block, layer, index = view.heads[number]
    figure.suptitle(f"{view.name}: head {block} {layer}.{index}".replace("$", r"\$"), fontsize=11)
    figure.set_layout_engine("constrained")
    return figure


def _eigenvalues(axis: "Axes", view: View, record: Json) -> None:
    """The mean as a cross, the root of the mean squared distance from it as a circle."""
    from matplotlib.patches import Circle

    values = record["eigenvalues"]
    real, imaginary = ([value[part] for value in values] for part in (0, 1))
    mean = sum(real) / len(real)
    squares = [(re - mean) ** 2 + im**2 for re, im in zip(real, imaginary, strict=True)]
    radius = math.sqrt(sum(squares) / len(squares))
    axis.scatter(real, imaginary, s=14, color=LINES[0], alpha=0.7)
    axis.plot([mean], [0], "+", color=LINES[1], ms=12, mew=2, label=f"mean {mean:.3g}")
    axis.add_patch(Circle((mean, 0), radius, fill=False, color=LINES[1], ls="--", label=f"deviation {radius:.3g}"))
    axis.set_aspect("equal", adjustable="datalim")
    axis.set(xlabel="real part", ylabel="imaginary part")
    _finish(axis, "Eigenvalues in the complex plane")


def _profile(axis: "Axes", view: View, record: Json) -> None:
    length = view.length or 1024
    for number, (name, line) in enumerate(record["profiles"].items()):
        places = [1 + step * (length - 1) / max(1, len(line) - 1) for step in range(len(line))]
        _line(axis, places, line, PROFILE_WORDS.get(str(name), str(name)), number)
    axis.set(xlabel="token t (the query is the last)", ylabel="probability ρ", ylim=(-0.02, 1.02))
    _finish(axis, "Which tokens are heard")


def _logit(axis: "Axes", view: View, record: Json) -> None:
    for line in (record.get("expected_logits") or {}).values():
        _line(axis, view.distances or range(len(line)), line, "from the weights", 0)
    for number, (name, line) in enumerate((record.get("logit_profile") or {}).items(), start=1):
        _line(axis, _middles(view), line, TEXT_WORDS.get(str(name), str(name)), number)
    _over_distance(axis, "logit ω")
    _finish(axis, "Expected logit over distance")


def _attention(axis: "Axes", view: View, record: Json) -> None:
    for number, (name, line) in enumerate(record["attention_profile"].items()):
        _line(axis, _middles(view), line, TEXT_WORDS.get(str(name), str(name)), number)
    _over_distance(axis, "share of attention")
    _finish(axis, "Attention over distance, without the first token")


_PANELS: dict[str, Panel] = {
    "eigenvalues": _eigenvalues,
    "profiles": _profile,
    "expected_logits": _logit,
    "logit_profile": _logit,
    "attention_profile": _attention,
}


def _middles(view: View) -> list[float]:
    return [(low + high) / 2 for low, high in view.bins or ()]


def _line(axis: "Axes", x: Sequence[float], y: Sequence[float], label: str, number: int) -> None:
    axis.plot(x, y, color=LINES[number], ls=DASHES[number], lw=1.8, label=label)


def _over_distance(axis: "Axes", label: str) -> None:
    """By factors, with zero as the first step."""
    axis.set_xscale("symlog", base=2, linthresh=1)
    ticks = [0, 1, 4, 16, 64, 256, 1024, 4096]
    kept = [tick for tick in ticks if tick <= axis.get_xlim()[1]]
    axis.set_xticks(kept, [str(tick) for tick in kept])
    axis.set(xlabel="distance Δ in tokens", ylabel=label, xlim=(0, None))


def _finish(axis: "Axes", title: str) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
