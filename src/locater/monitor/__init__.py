"""Watching attention while a model trains or runs: statistics, alarms, what to do about them, and where they go."""

from ..attention.calls import AttentionCall
from ..attention.registered import register_kernel
from .actions import Action, Checkpoint, Event, Stop
from .alarms import Alarm, Thresholds
from .monitor import AttentionMonitor
from .remedies import Attach, RollBack
from .report import LayerReport, Report
from .sinks import JsonLines, MLflow, Sink, TensorBoard, Terminal, Trackio, WeightsAndBiases
from .tally import Scope

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
    "Scope",
    "Sink",
    "Stop",
    "TensorBoard",
    "Terminal",
    "Thresholds",
    "Trackio",
    "WeightsAndBiases",
    "register_kernel",
]
