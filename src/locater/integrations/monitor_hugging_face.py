"""The monitor as a callback of the Hugging Face `Trainer`."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..monitor.monitor import AttentionMonitor
from ..monitor.report import Report


class AttentionCallback(TrainerCallback):
    """`Trainer(…, callbacks=[AttentionCallback(every=100, sinks=[Terminal()])])`; options are the monitor's.

    A step is an optimiser step, however many batches are accumulated. Metrics also join the trainer's log history.
    """

    def __init__(self, **options: Any):
        self.options = options
        self.monitor: AttentionMonitor | None = None
        self.report: Report | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        assert isinstance(model, nn.Module)
        self.monitor = AttentionMonitor(model, **self.options).attach()
        self.monitor.num_steps = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.monitor is not None and (report := self.monitor.step(state.global_step)) is not None:
            self.report = report
            state.log_history.append({**report.metrics(), "step": report.step})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.monitor is not None:
            self.monitor.__exit__(None, None, None)
            self.monitor = None
