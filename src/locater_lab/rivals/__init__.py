"""Arms of studies under the interface of stabilisers; what practitioners use is in `locater.stabilisers`."""

from .alpha_decay import AlphaDecay
from .initialisation import MimeticInitialisation, SpectralInitialisation
from .spectral_norm import SpectralNorm

__all__ = ["AlphaDecay", "MimeticInitialisation", "SpectralInitialisation", "SpectralNorm"]
