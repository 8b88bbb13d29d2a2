"""The signal propagation probability ρ_t of a head under Gaussian random-walk tokens, in independent ways."""

from . import clipped_softmax, closed_form, exact, monte_carlo, regimes, rotary
from .random_walk import Estimate
from .regimes import REGIMES, classify, classify_all, localisation

__all__ = [
    "REGIMES",
    "Estimate",
    "classify",
    "classify_all",
    "clipped_softmax",
    "closed_form",
    "exact",
    "localisation",
    "monte_carlo",
    "regimes",
    "rotary",
]
