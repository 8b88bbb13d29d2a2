"""A picture of predicted against measured attention, a point per head; needs matplotlib and no torch."""

from typing import TYPE_CHECKING

from ..errors import counted
from ..quantities import quantity
from ..records import Json
from .figures import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure


def prediction(document: Json) -> "Figure":
    """Four panels, predicted over measured, coloured by layer; on the diagonal the prediction is right."""
    figure, axes = canvas(4, size=(9.6, 8.4))
    figure.set_layout_engine("constrained")
    points = None
    for panel, (name, rho) in zip(axes, document["spearman"].items(), strict=True):
        points = _panel(panel, document, name)
        words = "" if rho is None else f", Spearman {rho:.2f}"
        panel.set_title(f"{quantity(name).words.capitalize()}{words}", loc="left", fontsize=10)
    assert points is not None, "there are numbers, so there is a panel"
    figure.colorbar(points, ax=axes, label="layer", fraction=0.03)
    tokens = document["tokens"]
    figure.suptitle(
        f"{counted(len(document['heads']), 'head')}, predicted from {tokens['calibration']} tokens, "
        f"measured on {tokens['test']} others",
        fontsize=11,
    )
    return figure


def _panel(panel: "Axes", document: Json, name: str) -> "PathCollection":
    heads = document["heads"]
    predicted, measured = ([head[side][name] for head in heads] for side in ("predicted", "measured"))
    top = max(*predicted, *measured) if name == "mean_distance" else 1.0
    panel.plot([0, top], [0, top], color="#999999", lw=1, ls="--")
    panel.set(xlabel="measured", ylabel="predicted")
    return panel.scatter(measured, predicted, c=[head["layer"] for head in heads], cmap="viridis", s=14)
