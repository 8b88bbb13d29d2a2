"""The signal propagation probability ρ_t of a head under Gaussian random-walk tokens, in independent ways."""

from . import closed_form

__all__ = ["closed_form"]
