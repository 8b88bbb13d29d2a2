"""Encoder-decoders and encoders of speech: self-attention on both sides, and cross-attention."""

from .schema import Family

FAMILIES: tuple[Family, ...] = ()
