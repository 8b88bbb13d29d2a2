"""Families of models as tables: from a config and tensor names to heads, for files and live modules alike."""

from .embeddings import embedding_scale
from .layout import read_layout
from .model import Model, open_model, spans, wanted_layers
from .places import Places, Tensors
from .reader import Layer, build_layer
from .registry import find_family
from .schema import Attention, Config, Family, NormAt
from .slices import HeadRows, Slice, Slices, slices

__all__ = [
    "Attention",
    "Config",
    "Family",
    "HeadRows",
    "Layer",
    "Model",
    "NormAt",
    "Places",
    "Slice",
    "Slices",
    "Tensors",
    "build_layer",
    "embedding_scale",
    "find_family",
    "open_model",
    "read_layout",
    "slices",
    "spans",
    "wanted_layers",
]
