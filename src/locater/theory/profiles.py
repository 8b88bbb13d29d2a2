"""ρ_t of a `Head`, with its own scale, norms and positions: the door to the other files of this folder.

And of weights or moments by every method, as the document of `locater theory`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from ..head import Head
from ..records import Json
from ..spectra import Covariance, Moments, moments, whiten
from . import closed_form, exact, monte_carlo, random_energy, regimes
from .random_walk import Estimate, Turns

Method = Literal["closed", "exact", "monte-carlo"]
METHODS: tuple[str, ...] = get_args(Method)
NUM_WALKS = 20_000  # unless told
LARGEST = 1e300  # of a moment: sums and squares of others leave double precision


def profile(
    head: Head,
    *,
    length: int,
    method: Method = "closed",
    covariance: Covariance = 1.0,
    num_walks: int = NUM_WALKS,
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
    turns = None
    if head.rotary is not None:
        turns = Turns(head.rotary.pairs, head.rotary.frequencies(length), head.rotary.amplitude)
    if method == "monte-carlo":
        walks = torch.Generator().manual_seed(seed)
        simulate = partial(monte_carlo.profile, query, key, num_walks=num_walks, generator=walks, turns=turns)
        return simulate(length=length, temperature=head.temperature).mean
    if turns is not None:
        return closed_form.rotary_profile(query, key, length=length, temperature=head.temperature, turns=turns)
    if method == "exact":
        return exact.profile(query, key, length=length, temperature=head.temperature)
    added = head.position_bias  # to the logits of the last query
    bias = None if added is None else added(torch.arange(length - 1, -1, -1)[None])[0].detach().double()
    return closed_form.from_moments(moments(query, key), length=length, temperature=head.temperature, bias=bias)


def _check(head: Head, method: str) -> None:
    allowed = ["closed"]
    if head.position_bias is None:
        allowed += ["monte-carlo"] if head.rotary is not None else ["exact", "monte-carlo"]
    if method not in allowed:
        raise refusal(f"a method among {', '.join(allowed)} for this head's positions", repr(method))


def example_head() -> tuple[Float[Tensor, "d_head d_model"], Float[Tensor, "d_head d_model"]]:
    """A small head to look at: query and key share a direction each, plus noise. Localized, and not symmetric."""
    noise = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shared = torch.eye(6, 12, dtype=torch.float64)
    return shared * 0.7 + 0.15 * noise[0], shared * 0.7 + 0.15 * noise[1]


def profile_of_weights(
    query: Float[Tensor, "d_head d_model"],
    key: Float[Tensor, "d_head d_model"],
    *,
    length: int,
    methods: Sequence[str] = METHODS,
    temperature: float | None = None,
    seed: int = 0,
) -> Json:
    """Moments, regime and the profiles of a head given by its weights."""
    temperature = math.sqrt(query.shape[-2]) if temperature is None else temperature
    walks = torch.Generator().manual_seed(seed)
    simulate = partial(monte_carlo.profile, num_walks=NUM_WALKS, generator=walks)
    compute = {"closed": closed_form.profile, "exact": exact.profile, "monte-carlo": simulate}
    profiles: Json = {
        name: method(query, key, length=length, temperature=temperature)
        for name, method in compute.items()
        if name in methods
    }
    return _document(moments(query, key), length, temperature, profiles)


def profile_of_moments(
    trace: float,
    trace_of_square: float,
    frobenius_squared: float,
    *,
    length: int,
    temperature: float,
) -> Json:
    """The same from three moments, which fix the closed form only."""
    if not all(abs(one) < LARGEST for one in (trace, trace_of_square, frobenius_squared)):
        raise refusal(f"three finite moments below {LARGEST:g}", f"{trace}, {trace_of_square} and {frobenius_squared}")
    if not frobenius_squared >= abs(trace_of_square):
        raise refusal("‖A‖² of at least |tr A²|, as for every matrix", f"{frobenius_squared} and {trace_of_square}")
    given = (torch.tensor(value, dtype=torch.float64) for value in (trace, trace_of_square, frobenius_squared))
    found = Moments(*given, d_model=1, d_head=1)
    profile = closed_form.from_moments(found, length=length, temperature=temperature)
    return _document(found, length, temperature, {"closed": profile})


def _document(found: Moments, length: int, temperature: float, profiles: Json) -> Json:
    # The most faithful profile available decides the words.
    best = next(profiles[name] for name in ("exact", "closed", "monte-carlo") if name in profiles)
    best = best.mean if isinstance(best, Estimate) else best
    document: Json = {
        "schema": "locater.theory/1",
        "length": length,
        "temperature": temperature,
        "trace": float(found.trace),
        "trace_of_square": float(found.trace_of_square),
        "frobenius_squared": float(found.frobenius_squared),
        "xi": float(found.xi),
        "eta": float(found.eta),
        "regime": regimes.classify(best),
        "localisation": float(regimes.localisation(best)),
        "profiles": {name: _to_json(profile) for name, profile in profiles.items()},
    }
    if length > 1:
        document["softmax"] = _true_softmax(float(found.frobenius_squared) / temperature / temperature, length)
    return document


def _true_softmax(variance: float, length: int) -> Json:
    """The entropy of the true softmax over T independent tokens behind a norm, whose logits have variance ‖A‖²/λ²."""
    if not math.isfinite(variance):
        raise refusal("logits of a variance ‖A‖²/λ² that is a number", f"{variance}; give a larger λ")
    known = min(variance, random_energy.LARGEST)  # beyond, an upper bound
    entropy = float(random_energy.mean_entropy(torch.tensor(known, dtype=torch.float64), length))
    return {
        "variance": variance,
        "border": random_energy.border(length),
        "normalised_entropy": entropy / math.log(length),
    }


def _to_json(profile: Tensor | Estimate) -> Any:
    if isinstance(profile, Tensor):
        return profile.tolist()
    return {"mean": profile.mean.tolist(), "standard_error": profile.standard_error.tolist()}
