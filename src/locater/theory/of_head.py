"""ρ_t of a `Head`, with its own scale, norms and positions: the door to the other files of this folder."""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from ..head import Head
from ..spectra import Covariance, moments, whiten
from . import closed_form, exact, monte_carlo, rotary

Method = Literal["closed", "exact", "monte-carlo"]


def profile(
    head: Head,
    *,
    length: int,
    method: Method = "closed",
    covariance: Covariance = 1.0,
    num_walks: int = 20_000,
    seed: int = 0,
) -> Float[Tensor, " {length}"]:
    """ρ_1 … ρ_T: the probability that token t of a Gaussian random walk passes on a signal through this head.

    Input norms' gains are folded in, norms behind the projections linearised, and rotary positions or a bias by
    distance enter as they do in the logits. `closed` takes the logit as Gaussian (O(d·d_h²), good for large d_h),
    `exact` does not (O(d_h³) per point, no positions), `monte-carlo` simulates `num_walks` walks (no bias).

    >>> from locater import Head, Projection
    >>> weight = 0.6 * torch.eye(8, 32)
    >>> head = Head(0, 0, Projection(weight), Projection(weight), scale=8**-0.5)
    >>> [round(float(value), 2) for value in profile(head, length=6)]
    [0.14, 0.3, 0.77, 0.99, 0.99, 0.95]
    """
    head = head.anywhere()
    folded = head.folded()
    query, key = (side.linearised().detach().double() for side in (folded.query, folded.key))
    query, key = whiten(query, key, covariance)
    _check(head, method)
    settings: dict[str, Any] = dict(length=length, temperature=head.temperature)
    walks: dict[str, Any] = dict(num_walks=num_walks, generator=torch.Generator().manual_seed(seed))
    if head.rotary is not None:
        turning = head.rotary.frequencies(length), head.rotary.pairs, head.rotary.amplitude
        settings |= dict(zip(("frequencies", "pairs", "amplitude"), turning, strict=True))
        if method == "closed":
            return rotary.profile(query, key, **settings)
        return rotary.monte_carlo(query, key, **settings, **walks).mean
    if method == "exact":
        return exact.profile(query, key, **settings)
    if method == "monte-carlo":
        return monte_carlo.profile(query, key, **settings, **walks).mean
    return closed_form.from_moments(moments(query, key), bias=_bias(head, length), **settings)


def _check(head: Head, method: str) -> None:
    allowed = ["closed"]
    if head.position_bias is None:
        allowed += ["monte-carlo"] if head.rotary is not None else ["exact", "monte-carlo"]
    if method not in allowed:
        raise refusal(f"a method among {', '.join(allowed)} for this head's positions", repr(method))


def _bias(head: Head, length: int) -> Float[Tensor, " {length}"] | None:
    """Compute the bias that positions add to the logits of the last query."""
    if head.position_bias is None:
        return None
    return head.position_bias(torch.arange(length - 1, -1, -1)[None])[0].detach().double()
