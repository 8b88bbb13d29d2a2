"""One head's propagation probability by every method, as one document."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from ..records import Json
from ..spectra import Covariance, Moments, moments, whiten
from . import closed_form, exact, monte_carlo, random_energy, regimes

LARGEST = 1e300  # of a moment: sums and squares of others leave double precision
METHODS = ("closed", "exact", "monte-carlo")


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
    covariance: Covariance = 1.0,
    num_walks: int = 20_000,
    seed: int = 0,
    limit: bool = False,
) -> Json:
    """Moments, regime and the profiles of a head given by its weights."""
    temperature = math.sqrt(query.shape[-2]) if temperature is None else temperature
    options: dict[str, Any] = dict(length=length, temperature=temperature, covariance=covariance)
    profiles: Json = {}
    if "closed" in methods:
        profiles["closed"] = closed_form.profile(query, key, **options)
    if "exact" in methods:
        profiles["exact"] = exact.profile(query, key, **options)
    if "monte-carlo" in methods:
        options |= dict(num_walks=num_walks, generator=torch.Generator().manual_seed(seed))
        profiles["monte-carlo"] = monte_carlo.profile(query, key, **options)
    return _document(moments(*whiten(query, key, covariance)), length, temperature, profiles, limit)


def profile_of_moments(
    trace: float,
    trace_of_square: float,
    frobenius_squared: float,
    *,
    length: int,
    temperature: float,
    limit: bool = False,
) -> Json:
    """The same from three moments, which fix the closed form only."""
    if not all(abs(one) < LARGEST for one in (trace, trace_of_square, frobenius_squared)):
        raise refusal(f"three finite moments below {LARGEST:g}", f"{trace}, {trace_of_square} and {frobenius_squared}")
    if not frobenius_squared >= abs(trace_of_square):
        raise refusal("‖A‖² of at least |tr A²|, as for every matrix", f"{frobenius_squared} and {trace_of_square}")
    given = (torch.tensor(value, dtype=torch.float64) for value in (trace, trace_of_square, frobenius_squared))
    found = Moments(*given, d_model=1, d_head=1)
    profile = closed_form.from_moments(found, length=length, temperature=temperature)
    return _document(found, length, temperature, {"closed": profile}, limit)


def _document(found: Moments, length: int, temperature: float, profiles: Json, limit: bool) -> Json:
    # The most faithful profile available decides the words.
    name = next(name for name in ("exact", "closed", "monte-carlo") if name in profiles)
    best = profiles[name].mean if name == "monte-carlo" else profiles[name]
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
        "profiles": {name: _plain(profile) for name, profile in profiles.items()},
    }
    if length > 1:
        document["softmax"] = _true_softmax(float(found.frobenius_squared) / temperature / temperature, length)
    if limit:
        theta = torch.linspace(0, 1, 101, dtype=torch.float64)
        values = closed_form.limit(found, theta, temperature=temperature)
        document["limit"] = {"theta": theta.tolist(), "closed": values.tolist()}
    return document


def _true_softmax(variance: float, length: int) -> Json:
    """The entropy of the true softmax over T independent tokens behind a norm, whose logits have variance ‖A‖²/λ²."""
    known = min(variance, random_energy.LARGEST)  # beyond, an upper bound
    entropy = float(random_energy.mean_entropy(torch.tensor(known, dtype=torch.float64), length))
    return {
        "variance": variance,
        "border": random_energy.border(length),
        "normalised_entropy": entropy / math.log(length),
    }


def _plain(profile: Any) -> Any:
    if isinstance(profile, Tensor):
        return profile.tolist()
    return {"mean": profile.mean.tolist(), "standard_error": profile.standard_error.tolist()}
