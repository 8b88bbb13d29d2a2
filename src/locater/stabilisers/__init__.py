"""LocAteR and its rivals under one interface, for anyone's training loop.

The mathematics alone, on two weight tensors, is in `locater.stabilisers.penalty`.
"""

from .base import Stabiliser
from .live.gains import Normalised, Raw
from .locater import LocAteR
from .mean import Constant, Free, Initial, Penalised, Projected, Until, WarmUp
from .rivals.attention_losses import EntropyBonus, ZLoss
from .rivals.qk_clip import QKClip
from .rivals.qk_norm import L2, RMS, QKNorm
from .rivals.reparametrisation import SigmaReparam
from .rivals.soft_cap import SoftCap
from .rivals.weight_decay import QKDecay
from .scales import Eta, Frobenius, OverOffsets, Scale, TraceOfSquare, Variance
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
    "Normalised",
    "OverOffsets",
    "Penalised",
    "Projected",
    "QKClip",
    "QKDecay",
    "QKNorm",
    "RMS",
    "Raw",
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
