"""Encoders of text."""

from .schema import Family

FAMILIES: tuple[Family, ...] = ()
