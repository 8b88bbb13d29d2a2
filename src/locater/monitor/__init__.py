"""Watching attention while a model trains or runs: statistics, alarms, what to do about them, and where they go."""

from ..attention.calls import AttentionCall
from ..attention.registered import register_kernel
from .actions import Action, Attach, Checkpoint, Event, RollBack, Stop
from .alarms import Alarm, Thresholds
from .monitor import AttentionMonitor
from .report import LayerReport, Report
from .sinks import JsonLines, MLflow, Sink, TensorBoard, Terminal, Trackio, WeightsAndBiases

__all__ = [
    "Action",
    "Alarm",
    "Attach",
    "AttentionCall",
    "AttentionMonitor",
    "Checkpoint",
    "Event",
    "JsonLines",
    "LayerReport",
    "MLflow",
    "Report",
    "RollBack",
    "Sink",
    "Stop",
    "TensorBoard",
    "Terminal",
    "Thresholds",
    "Trackio",
    "WeightsAndBiases",
    "register_kernel",
]
