"""LocAteR and its rivals under one interface, for anyone's training loop."""

from .base import Stabiliser
from .functionals import Eta, Frobenius, OverOffsets, TraceOfSquare, Variance
from .gains import Normalised, Raw
from .locater import LocAteR
from .means import Constant, Free, Initial, Penalty, Projection, WarmUp

__all__ = [
    "Constant",
    "Eta",
    "Free",
    "Frobenius",
    "Initial",
    "LocAteR",
    "Normalised",
    "OverOffsets",
    "Penalty",
    "Projection",
    "Raw",
    "Stabiliser",
    "TraceOfSquare",
    "Variance",
    "WarmUp",
]
