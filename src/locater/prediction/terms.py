"""Which terms of the theory a prediction uses: all of them, unless one asks what each is worth."""

from dataclasses import dataclass


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
