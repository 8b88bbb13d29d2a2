"""The signal propagation probability ρ_t of a head under Gaussian random-walk tokens, in independent ways.

`profile(head, length=…)` is the door. The files behind it take weights: closed_form, exact, monte_carlo, rotary;
`monte_carlo` has the theory's softmax too, and how far it is from the true one; `depth` follows the true softmax
through layers, `random_energy` has its entropy over independent tokens. `gaussian_tokens` replaces the walk by measured
moments.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        closed_form,
        depth,
        exact,
        gaussian_tokens,
        monte_carlo,
        random_energy,
        regimes,
        rotary,
    )
    from .profiles import profile
    from .random_walk import Estimate
    from .regimes import REGIMES, classify, classify_all, localisation

__all__ = [
    "REGIMES",
    "Estimate",
    "classify",
    "classify_all",
    "closed_form",
    "depth",
    "exact",
    "gaussian_tokens",
    "localisation",
    "monte_carlo",
    "profile",
    "random_energy",
    "regimes",
    "rotary",
]

# Looked up when first used: a scan needs few of them.
_HOMES = {
    "REGIMES": "regimes",
    "Estimate": "random_walk",
    "classify": "regimes",
    "classify_all": "regimes",
    "localisation": "regimes",
    "profile": "profiles",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'locater.theory' has no attribute {name!r}")
    home = import_module(f".{_HOMES.get(name, name)}", __name__)
    return getattr(home, name) if name in _HOMES else home
