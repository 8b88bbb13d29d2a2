"""The monitor as a callback of Lightning's `Trainer`."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from ..errors import refusal
from ..monitor.monitor import AttentionMonitor
from ..monitor.report import Report


class AttentionCallback(Callback):
    """`Trainer(callbacks=[AttentionCallback(every=100)])`; options are the monitor's.

    Metrics go to the trainer's loggers. `part` names the attribute that holds the transformer; without it the first
    child with a config is taken, or the module itself.
    """

    def __init__(self, *, part: str | None = None, **options: Any):
        self.part, self.options = part, options
        self.monitor: AttentionMonitor | None = None
        self.report: Report | None = None
        self.state: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.monitor = AttentionMonitor(self._model(pl_module), **self.options).attach()
        if self.state is not None:
            self.monitor.load_state_dict(self.state)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        # Accumulated batches leave the number of optimiser steps as it was.
        if self.monitor is None or trainer.global_step == self.monitor.num_steps:
            return
        report = self.monitor.step(trainer.global_step)
        if report is not None:
            self.report = report
            for logger in trainer.loggers:
                logger.log_metrics(report.metrics(), step=report.step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            self.state = self.monitor.state_dict()
            self.monitor.__exit__(None, None, None)
            self.monitor = None

    def state_dict(self) -> dict[str, Any]:
        return (self.state or {}) if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict or None

    def _model(self, module: nn.Module) -> nn.Module:
        if self.part is None:
            with_config = (child for child in module.children() if hasattr(child, "config"))
            return next(with_config, module)
        found = getattr(module, self.part, None)
        if not isinstance(found, nn.Module):
            raise refusal(f"a module under the name {self.part}", type(found).__name__)
        return found
