"""Families of models as tables: from a config and tensor names to heads, for files and live modules alike."""

from .build import Layer, build
from .config import Config
from .places import Places, Tensors
from .registry import find_family
from .schema import Family

__all__ = ["Config", "Family", "Layer", "Places", "Tensors", "build", "find_family"]
