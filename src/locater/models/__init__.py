"""Families of models as tables: from a config and tensor names to heads, for files and live modules alike."""

from .config import Config, embedding_scale
from .model import Model, open_model, spans, wanted_layers
from .module import AttentionModule
from .reader import read_heads
from .registry import find_family, read_layout
from .schema import Attention, Family, NormAt
from .slices import HeadRows, Slice, slices
from .tensors import Tensors

__all__ = [
    "Attention",
    "AttentionModule",
    "Config",
    "Family",
    "HeadRows",
    "Model",
    "NormAt",
    "Slice",
    "Tensors",
    "embedding_scale",
    "find_family",
    "open_model",
    "read_heads",
    "read_layout",
    "slices",
    "spans",
    "wanted_layers",
]
