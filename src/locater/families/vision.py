"""Encoders of images, alone or paired with text."""

from .schema import Family

FAMILIES: tuple[Family, ...] = ()
