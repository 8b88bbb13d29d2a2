"""Pictures of two trained models, without and with LocAteR; needs matplotlib and no torch."""

from typing import TYPE_CHECKING, Any

from locater.records import Json
from locater.report.figures import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Colours that stay apart in print and for colour-blind readers (after Okabe and Ito).
COLOURS = {"without": "#D55E00", "with": "#0072B2"}
EVEN_COLOUR = "#777777"
# Shares of attention are drawn from a sixteenth of the even share to sixteen times it.
MOST = 16


def draw_training(document: Json) -> "Figure":
    """While they learn: perplexity and entropy on held-out text; and the eigenvalues in the end."""
    figure, (perplexity, entropy, eigenvalues) = canvas(3, size=(13.5, 4.2))
    for name, model in document["models"].items():
        steps = [row["step"] for row in model["validations"]]
        style: dict[str, Any] = dict(color=COLOURS[name], lw=2, marker="o", ms=4, label=_label(name))
        perplexity.plot(steps, [row["perplexity"] for row in model["validations"]], **style)
        entropy.plot(steps, [row["entropy"] for row in model["validations"]], **style)
    _title(perplexity, "How well they predict held-out text\n(perplexity; lower is better)")
    perplexity.set(xlabel="training steps", ylabel="perplexity", yscale="log")
    _plain_numbers(perplexity)
    _title(entropy, "How evenly they attend on it\n(1: to all tokens alike, 0: to a single one)")
    entropy.set(xlabel="training steps", ylabel="entropy of attention, relative to even", ylim=(0, 1.02))
    _eigenvalues(eigenvalues, document)
    perplexity.legend(frameon=False)
    figure.tight_layout()
    return figure


def _eigenvalues(panel: "Axes", document: Json) -> None:
    for name, model in document["models"].items():
        scan = model["scan"]
        real, imaginary = ([value[part] / scan["temperature"] for value in scan["eigenvalues"]] for part in (0, 1))
        panel.scatter(real, imaginary, s=14, alpha=0.7, color=COLOURS[name], lw=0, label=_label(name))
    panel.axhline(0, color="#cccccc", lw=0.8, zorder=0)
    panel.axvline(0, color="#cccccc", lw=0.8, zorder=0)
    panel.set_aspect("equal", adjustable="datalim")
    panel.locator_params(axis="x", nbins=5)
    _title(panel, "The eigenvalues of W/λ after training\n(a point each; LocAteR penalises η, the scale of W)")
    panel.set(xlabel="real part", ylabel="imaginary part")


def draw_attention(document: Json) -> "Figure":
    """Draw measured attention: two maps in one scale of colour, the share of recent tokens, and one example."""
    figure, axes = canvas(4, size=(11.5, 9.6))
    figure.set_layout_engine("constrained")
    images = [_map(panel, document, name) for panel, name in zip(axes, document["models"], strict=False)]
    bar = figure.colorbar(
        images[-1], ax=axes[:2], fraction=0.03, extend="both", label="weight, relative to an even share"
    )
    bar.set_ticks([1 / 16, 1 / 4, 1, 4, 16], labels=["1/16", "1/4", "even", "4 ×", "16 ×"])
    bar.ax.minorticks_off()
    _within(axes[2], document)
    _example(axes[3], document)
    words = f"Attention measured on {document['num_texts']} held-out texts of {document['length']} tokens"
    figure.suptitle(words, fontsize=12)
    return figure


def _map(panel: "Axes", document: Json, name: str) -> "AxesImage":
    """Each row over its even share, 1/(tokens so far): else the first rows would outshine all others."""
    from matplotlib.colors import LogNorm

    weights = document["models"][name]["attention"]
    # Above the diagonal there is nothing to see, and at 0 a logarithm would be drawn as very little.
    nothing = float("nan")
    shares = [
        [weight * (query + 1) if key <= query else nothing for key, weight in enumerate(row)]
        for query, row in enumerate(weights)
    ]
    _title(panel, f"The model {_label(name)}, mean over the texts")
    first, last = 0.5, document["length"] + 0.5
    panel.set(xlabel="token attended to (position in the text)", ylabel="token that attends (position)")
    scale = LogNorm(1 / MOST, MOST)
    return panel.imshow(shares, cmap="RdBu_r", norm=scale, extent=(first, last, last, first), interpolation="nearest")


def _within(panel: "Axes", document: Json) -> None:
    numbers = range(1, document["length"] + 1)
    for name, model in document["models"].items():
        panel.plot(numbers, model["within"], color=COLOURS[name], lw=2, label=_label(name))
    panel.plot(numbers, document["even_within"], color=EVEN_COLOUR, lw=1.2, ls="--", label="if all counted alike")
    _title(panel, "How far back they look")
    panel.set(xlabel="the last … tokens (the attending one included)", ylabel="share of attention on them")
    panel.set(xlim=(1, document["length"]), ylim=(0, 1.02))
    panel.legend(frameon=False, loc="lower right")


def _example(panel: "Axes", document: Json) -> None:
    """The last tokens of one text as they are read, a pair of bars each."""
    # Between two dollars matplotlib would set mathematics.
    words = [repr(word)[1:-1].replace("$", r"\$") for word in document["words"]]
    for number, (name, model) in enumerate(document["models"].items()):
        places = [place + (number - 0.5) * 0.4 for place in range(len(words))]
        panel.barh(places, model["on_words"], height=0.4, color=COLOURS[name], label=_label(name))
    panel.set_yticks(range(len(words)), [f"“{word}”" for word in words])
    panel.invert_yaxis()
    _title(panel, "One example: what the last token of a text attends to")
    panel.set(xlabel="share of attention (the rest lies further back)", ylabel="the last tokens, as they are read")
    panel.legend(frameon=False)


def _label(name: str) -> str:
    return f"{name} LocAteR"


def _title(panel: "Axes", words: str) -> None:
    panel.set_title(words, loc="left", fontsize=10)


def _plain_numbers(panel: "Axes") -> None:
    """100, not 10²."""
    from matplotlib.ticker import LogLocator, ScalarFormatter

    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(ScalarFormatter())
    panel.yaxis.set_minor_locator(LogLocator(subs=()))
