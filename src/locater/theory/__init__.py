"""The signal propagation probability ρ_t of a head under Gaussian random-walk tokens, in independent ways.

`profile(head, length=…)` is the door. The files behind it take weights: closed_form, exact, monte_carlo, rotary;
`monte_carlo` has the theory's softmax too, and how far it is from the true one; `depth` follows the true softmax
through layers, `random_energy` has its entropy over independent tokens.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .regimes import REGIMES, classify, classify_all, localisation

if TYPE_CHECKING:
    from .profiles import profile

__all__ = ["REGIMES", "classify", "classify_all", "localisation", "profile"]
FILES = ("closed_form", "depth", "exact", "monte_carlo", "phase_diagram", "random_energy", "rotary")


def __getattr__(name: str) -> object:
    """Load the door and the files behind it when they are first used: a scan needs few of them."""
    if name == "profile":
        return import_module(".profiles", __name__).profile
    if name not in FILES:
        raise AttributeError(f"module 'locater.theory' has no attribute {name!r}")
    return import_module(f".{name}", __name__)
