"""Settings of a prediction: how much text it reads, how much is kept, and which terms of the theory it uses."""

from dataclasses import dataclass

from ..attention.statistics import NEAR
from ..errors import refusal


@dataclass(frozen=True)
class Effort:
    """Windows of `window` tokens: `calibration` of them to predict from, `test` others to measure.

    `texts` are drawn for each layer, from as many of its calibration windows. `lag_rank` bounds the rank of each lagged
    covariance: O(lag_rank²) numbers per lag and layer. `batch` windows are run at once.
    """

    window: int = 256
    calibration: int = 24
    test: int = 8
    lag_rank: int = 128
    texts: int = 16
    batch: int = 4
    seed: int = 0

    def __post_init__(self):
        check_window(self.window)
        if min(self.calibration, self.test, self.texts, self.batch) < 1:
            raise refusal("at least one window to calibrate on and one to test on", f"{self.calibration}, {self.test}")
        if self.lag_rank < 1:
            raise refusal("a rank of at least 1", self.lag_rank)

    def lag_rank_of(self, d_model: int, num_windows: int) -> int | None:
        """The rank for inputs this wide, None for full; a basis needs more tokens than its rank in the first batch."""
        most = max(1, min(self.batch, num_windows) * self.window // 2)
        return None if d_model <= self.lag_rank else min(self.lag_rank, most)


def check_window(length: int) -> None:
    if length < 2 * NEAR:
        raise refusal(f"windows of at least {2 * NEAR} tokens", length, f"keys nearer than {NEAR} are called near")


@dataclass(frozen=True)
class Terms:
    """Each term can be left out, to see what it adds to tokens from anywhere.

    `first`: the first token, and special tokens, stay in their places; so they do where `positions` are kept.
    `positions`: every token stays at its position.
    `sinks`: tokens that alone would draw more than the whole of a typical window stay in their windows too.
    `lags`: the expected logit takes the lagged covariances, tr W(Δ)Γ(Δ)/λ.
    """

    first: bool = True
    positions: bool = True
    sinks: bool = True
    lags: bool = True
