"""How much text a prediction reads, how closely the moments are kept, and which terms of the theory it uses."""

from dataclasses import dataclass

from ..attention.statistics import NEAR
from ..errors import refusal

WIDEST = 1024  # inputs wider than this get a covariance of this rank, unless told otherwise


@dataclass(frozen=True)
class Effort:
    """Windows of `window` tokens: `calibration` of them for the moments, `test` others to measure.

    `rank` bounds the rank of the covariance, `lag_rank` that of each lagged one: O(rank²) numbers per layer, and
    O(lag_rank²) per lag. `texts` are drawn from the moments for each layer. `batch` windows are run at once.
    """

    window: int = 256
    calibration: int = 24
    test: int = 8
    rank: int | None = None
    lag_rank: int = 128
    texts: int = 16
    batch: int = 4
    seed: int = 0

    def __post_init__(self):
        check_window(self.window)
        if min(self.calibration, self.test, self.texts, self.batch) < 1:
            raise refusal("at least one window to calibrate on and one to test on", f"{self.calibration}, {self.test}")
        if self.lag_rank < 1 or (self.rank is not None and self.rank < 1):
            raise refusal("ranks of at least 1", f"{self.rank} and {self.lag_rank}")

    def ranks(self, d_model: int, num_windows: int) -> tuple[int | None, int | None]:
        """Ranks for inputs this wide, None for full; a basis needs more tokens than its rank in the first batch."""
        most = max(1, min(self.batch, num_windows) * self.window // 2)
        rank = min(self.rank or WIDEST, most)
        lag_rank = min(self.lag_rank, most)
        full = d_model <= (self.rank or WIDEST)
        return (None if full else rank), (None if d_model <= self.lag_rank else lag_rank)


def check_window(length: int) -> None:
    if length < 2 * NEAR:
        raise refusal(f"windows of at least {2 * NEAR} tokens", length, f"keys nearer than {NEAR} are called near")


@dataclass(frozen=True)
class Terms:
    """Each term can be left out, to see what it adds.

    `first`: the first token, and special tokens at the end, have a mean and covariance of their own.
    `echoes`: later tokens whose input is that of the first one (sinks inside the text) are drawn apart too.
    `positions`: the mean input depends on the position, as far as it stands out of the noise.
    `lags`: the expected logit takes the lagged covariances, tr W(Δ)Γ(Δ)/λ.
    """

    first: bool = True
    echoes: bool = True
    positions: bool = True
    lags: bool = True
