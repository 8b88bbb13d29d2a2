"""The signal propagation probability ρ_t of a head under Gaussian random-walk tokens, in independent ways.

`profile(head, length=…)` is the door. The files behind it take weights: closed_form, exact, monte_carlo, rotary;
`clipped_softmax` has the theory's softmax and how far it is from the true one; `depth` follows the true softmax through
layers, `random_energy` has its entropy over independent tokens. `gaussian_tokens` replaces the walk by
measured moments.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        clipped_softmax,
        closed_form,
        depth,
        exact,
        gaussian_tokens,
        monte_carlo,
        random_energy,
        regimes,
        rotary,
        words,
    )
    from .of_head import profile
    from .random_walk import Estimate
    from .regimes import classify, classify_all, localisation
    from .words import REGIMES

__all__ = [
    "REGIMES",
    "Estimate",
    "classify",
    "classify_all",
    "clipped_softmax",
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
    "words",
]

# Looked up when first used: reports and the command line take the words without loading torch.
_HOMES = {
    "REGIMES": "words",
    "Estimate": "random_walk",
    "classify": "regimes",
    "classify_all": "regimes",
    "localisation": "regimes",
    "profile": "of_head",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'locater.theory' has no attribute {name!r}")
    home = import_module(f".{_HOMES.get(name, name)}", __name__)
    return getattr(home, name) if name in _HOMES else home
