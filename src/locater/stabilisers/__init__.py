"""LocAteR and its rivals under one interface, for anyone's training loop."""

from .base import Stabiliser
from .entropy import EntropyBonus
from .functionals import Eta, Frobenius, OverOffsets, TraceOfSquare, Variance
from .gains import Normalised, Raw
from .locater import LocAteR
from .means import Constant, Free, Initial, Penalty, Projection, Until, WarmUp
from .mimetic import MimeticInitialisation
from .qk_clip import QKClip
from .qk_norm import L2, RMS, QKNorm
from .sigma_reparam import SigmaReparam
from .soft_cap import SoftCap
from .spectral_initialisation import SpectralInitialisation
from .spectral_norm import SpectralNorm
from .weight_decay import QKDecay
from .z_loss import ZLoss

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
