"""Families of models as tables: from a config and tensor names to heads, for files and live modules alike."""

from .build import Layer, build
from .config import Config
from .layout import read_layout
from .model import Model, open_model, spans
from .places import Places, Tensors
from .registry import find_family
from .schema import Family

__all__ = [
    "Config",
    "Family",
    "Layer",
    "Model",
    "Places",
    "Tensors",
    "build",
    "find_family",
    "open_model",
    "read_layout",
    "spans",
]
