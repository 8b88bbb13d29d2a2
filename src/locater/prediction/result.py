"""`Prediction`: every head as predicted and as measured, side by side."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from scipy.stats import spearmanr

from ..behaviour import (
    MeanAttention,
    Place,
    Told,
    describe_heads,
    head_name,
    numbers_of,
    words_of,
)
from ..errors import counted
from ..quantities import NEAR, quantity
from ..records import Json, data_frame
from ..report.shown import Shown
from ..report.stories import describe_accuracy, describe_halves
from .numbers import NAMES, Numbers, distance_bins, first_query

if TYPE_CHECKING:
    import pandas


Measured = TypeVar("Measured")
TRUSTED = 0.9  # rank correlations below it are warned of


@dataclass(frozen=True)
class HeadPrediction:
    """One head: what its weights and single tokens of its inputs predict, and what it does on text not seen before."""

    block: str
    layer: int
    head: int
    predicted: Numbers
    measured: Numbers
    halves: tuple[Numbers, Numbers] | None = None  # measured on two halves of the windows

    @property
    def place(self) -> Place:
        return self.block, self.layer, self.head

    def to_json(self, text: str = "") -> Json:
        """The head's part of a document; `text` decides which words may be said of it."""
        words = [word.name for word in words_of(_attention(self.measured), text)]
        document = {"block": self.block, "layer": self.layer, "head": self.head, "words": words}
        document |= {"predicted": self.predicted.to_json(), "measured": self.measured.to_json()}
        profiles = {"predicted": list(self.predicted.profile), "measured": list(self.measured.profile)}
        logits = {"predicted": list(self.predicted.logits), "measured": list(self.measured.logits)}
        return document | {"attention_profile": profiles, "logit_profile": logits}


@dataclass(frozen=True, repr=False)
class Prediction(Shown):
    """All heads of a model, and how well prediction and measurement agree."""

    source: str
    text: str
    length: int
    calibration_windows: int
    test_windows: int
    heads: tuple[HeadPrediction, ...]
    left_out: tuple[str, ...] = ()
    loss: float | None = None  # nats per token on the measured windows, where the model predicts the next one

    def pairs(self, name: str) -> tuple[list[float], list[float]]:
        """Predicted and measured values of one number, head by head."""
        return [getattr(h.predicted, name) for h in self.heads], [getattr(h.measured, name) for h in self.heads]

    def agreement(self, measure: Callable[[list[float], list[float]], Measured]) -> dict[str, Measured]:
        return {name: measure(*self.pairs(name)) for name in NAMES}

    @property
    def spearman(self) -> dict[str, float | None]:
        return self.agreement(spearman)

    @property
    def calibration_error(self) -> dict[str, float]:
        """The mean absolute difference."""
        return self.agreement(mean_absolute_error)

    @property
    def ceiling(self) -> dict[str, float | None]:
        """The Spearman that a perfect prediction would have, as far as the measurement can tell; None if it cannot.

        √(2r/(1 + r)), r the rank correlation of two halves of the measured windows (Spearman and Brown): what noise
        in the measurement leaves.
        """
        pairs = [head.halves for head in self.heads if head.halves is not None]
        return {
            name: ceiling([getattr(one, name) for one, _ in pairs], [getattr(other, name) for _, other in pairs])
            for name in NAMES
        }

    def behaviour(self) -> list[Told]:
        """Describe what the heads do on the measured windows: how many, in which layers, and whom to look at first."""
        attentions = [_attention(head.measured) for head in self.heads]
        return describe_heads([head.place for head in self.heads], attentions, text=self.text)

    def accuracy(self) -> list[str]:
        """Say how far to trust the words, by the halves of the windows, and the prediction, by the ranks of heads."""
        halves = [head.halves for head in self.heads if head.halves is not None]
        pairs = [(_attention(one), _attention(other)) for one, other in halves]
        return [*describe_halves(pairs, text=self.text), *describe_accuracy(self.spearman, self.calibration_error)]

    @property
    def tokens(self) -> dict[str, int]:
        return {"calibration": self.calibration_windows * self.length, "test": self.test_windows * self.length}

    @property
    def warnings(self) -> list[str]:
        """List what does not hold of this model: badly predicted ranks, and a loss of a wrong set-up."""
        return [
            f"{quantity(name).words} is not predicted well here (Spearman {rho:.2f}, below {TRUSTED}): "
            "do not rank heads by it"
            for name, rho in self.spearman.items()
            if rho is not None and rho < TRUSTED
        ]

    def to_json(self) -> Json:
        """The document that `locater predict --json` writes."""
        return {
            "schema": "locater.predict/2",
            "source": self.source,
            "text": self.text,
            "window": self.length,
            "first_query": first_query(self.length),
            "near": NEAR,
            "windows": {"calibration": self.calibration_windows, "test": self.test_windows},
            "tokens": self.tokens,
            "loss": self.loss,
            "behaviour": [told.sentence for told in self.behaviour()],
            "accuracy": self.accuracy(),
            "warnings": self.warnings,
            "spearman": self.spearman,
            "ceiling": self.ceiling,
            "calibration_error": self.calibration_error,
            "bias": self.agreement(bias),
            "distance_bins": [list(span) for span in distance_bins(self.length)],
            "left_out": list(self.left_out),
            "heads": [head.to_json(self.text) for head in self.heads],
        }

    def to_frame(self) -> "pandas.DataFrame":
        """A pandas DataFrame, a row per head, with columns such as `predicted_near_mass_beyond_first`."""
        rows = []
        for head in self.heads:
            sides = {"predicted": head.predicted, "measured": head.measured}
            numbers = {f"{side}_{name}": getattr(of, name) for side, of in sides.items() for name in NAMES}
            rows.append({"block": head.block, "layer": head.layer, "head": head.head, **numbers})
        return data_frame(rows)

    def summary(self) -> str:
        """The heads in plain words, the accuracy of the prediction, and the heads that are predicted worst."""
        tokens = self.tokens
        lines = [
            f"{self.source}: {counted(len(self.heads), 'head')} predicted from {tokens['calibration']:,} tokens, "
            f"measured on {tokens['test']:,} others ({self.test_windows} windows of {self.length})"
        ]
        if self.loss is not None:
            lines.append(f"loss on the measured windows: {self.loss:.2f} nats per token")
        lines += [*(told.sentence for told in self.behaviour()), *self.accuracy()]
        for name, error in self.calibration_error.items():
            rho = self.spearman[name]
            ranked = "does not vary" if rho is None else f"Spearman {rho:.2f}"
            lines.append(f"{quantity(name).words}: {ranked}, off by {error:.3g} on average")
        for head in self.worst(3):
            lines.append(
                f"{head_name(*head.place)}: near mass beyond the first token predicted "
                f"{head.predicted.near_mass_beyond_first:.2f}, measured {head.measured.near_mass_beyond_first:.2f}"
            )
        lines += self.warnings
        return "\n".join([*lines, *(f"left out: {sentence}" for sentence in self.left_out)])

    def worst(self, count: int) -> list[HeadPrediction]:
        """The heads whose near mass beyond the first token is predicted worst."""
        return sorted(self.heads, key=lambda head: -abs(_near(head.predicted) - _near(head.measured)))[:count]


def _attention(numbers: Numbers) -> MeanAttention:
    return numbers_of(numbers.to_json(), numbers.profile)


def _near(numbers: Numbers) -> float:
    return numbers.near_mass_beyond_first


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """The correlation of the ranks; None where one side does not vary.

    >>> round(spearman([1.0, 2.0, 3.0], [10.0, 20.0, 15.0]), 6)
    0.5
    """
    if min(predicted) == max(predicted) or min(measured) == max(measured):
        return None
    return float(spearmanr(predicted, measured).statistic)  # type: ignore  # scipy types it as a tuple


def ceiling(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The largest rank correlation that anything can have with the mean of two noisy rankings, from their own.

    >>> ceiling([1.0, 2.0, 3.0], [1.0, 2.0, 4.0]), ceiling([], []), round(ceiling([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]), 3)
    (1.0, None, 0.816)
    """
    r = spearman(one, other) if one else None
    return None if r is None else math.sqrt(max(0.0, 2 * r / (1 + r))) if r > -1 else 0.0


def mean_absolute_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(predicted, measured, strict=True)) / len(predicted)


def bias(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Predicted less measured, on average."""
    return sum(a - b for a, b in zip(predicted, measured, strict=True)) / len(predicted)
