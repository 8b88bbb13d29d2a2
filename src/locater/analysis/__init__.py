"""Heads to rows: the spectrum of each head, and the regime that the theory reads off it."""

from .layer import Analysis, Settings, analyse
from .rows import HeadRow
from .workers import Workers, workers

__all__ = ["Analysis", "HeadRow", "Settings", "Workers", "analyse", "workers"]
