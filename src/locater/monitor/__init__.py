"""Watching attention while a model trains or runs: statistics, alarms, and where they go."""

from .alarms import Alarm, Thresholds
from .monitor import AttentionMonitor
from .report import LayerReport, Report
from .sinks import JsonLines, Sink, TensorBoard, Terminal, Trackio, WeightsAndBiases

__all__ = [
    "Alarm",
    "AttentionMonitor",
    "JsonLines",
    "LayerReport",
    "Report",
    "Sink",
    "TensorBoard",
    "Terminal",
    "Thresholds",
    "Trackio",
    "WeightsAndBiases",
]
