"""LocAteR and its rivals under one interface, for anyone's training loop.

The mathematics alone, on two weight tensors, is in `locater.stabilisers.penalty`.
"""

from .base import Stabiliser
from .forward import L2, RMS, QKNorm, SoftCap
from .locater import LocAteR
from .losses import EntropyBonus, QKDecay, ZLoss
from .mean import Constant, Free, Initial, Penalised, Projected, Until, WarmUp
from .qk_clip import QKClip
from .reparametrisation import SigmaReparam
from .scales import Eta, Frobenius, Scale, TraceOfSquare, Variance
from .strength import Auto

__all__ = [
    "Auto",
    "Constant",
    "EntropyBonus",
    "Eta",
    "Free",
    "Frobenius",
    "Initial",
    "L2",
    "LocAteR",
    "Penalised",
    "Projected",
    "QKClip",
    "QKDecay",
    "QKNorm",
    "RMS",
    "Scale",
    "SigmaReparam",
    "SoftCap",
    "Stabiliser",
    "TraceOfSquare",
    "Until",
    "Variance",
    "WarmUp",
    "ZLoss",
]
