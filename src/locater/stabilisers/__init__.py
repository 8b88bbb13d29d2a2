"""LocAteR and its rivals under one interface, for anyone's training loop."""

from .base import Stabiliser
from .live.gains import Normalised, Raw
from .locater import LocAteR
from .rivals.entropy import EntropyBonus
from .rivals.mimetic import MimeticInitialisation
from .rivals.qk_clip import QKClip
from .rivals.qk_norm import L2, RMS, QKNorm
from .rivals.sigma_reparam import SigmaReparam
from .rivals.soft_cap import SoftCap
from .rivals.spectral_initialisation import SpectralInitialisation
from .rivals.spectral_norm import SpectralNorm
from .rivals.weight_decay import QKDecay
from .rivals.z_loss import ZLoss
from .scales import Eta, Frobenius, OverOffsets, TraceOfSquare, Variance
from .targets import Constant, Free, Initial, Penalty, Projection, Until, WarmUp

__all__ = [
    "Constant",
    "EntropyBonus",
    "Eta",
    "Free",
    "Frobenius",
    "Initial",
    "L2",
    "LocAteR",
    "MimeticInitialisation",
    "Normalised",
    "OverOffsets",
    "Penalty",
    "Projection",
    "QKClip",
    "QKDecay",
    "QKNorm",
    "RMS",
    "Raw",
    "SigmaReparam",
    "SoftCap",
    "SpectralInitialisation",
    "SpectralNorm",
    "Stabiliser",
    "TraceOfSquare",
    "Until",
    "Variance",
    "WarmUp",
    "ZLoss",
]
