"""Stabilisers and the monitor in the Trainer of Lightning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from ..errors import refusal
from ..models.sources import Live
from ..monitor.monitor import AttentionMonitor
from ..monitor.report import Report
from ..records import State
from ..stabilisers import LocAteR, Stabiliser

Make = Callable[[nn.Module, Optimizer], Stabiliser]


class StabiliserCallback(Callback):
    """`Trainer(callbacks=[StabiliserCallback(make, model="model")])`: `make(model, optimizer)` gives the stabiliser.

    `model` is the attribute of the LightningModule that holds the transformer. Steps whenever the optimiser has. Its
    state is part of Lightning's checkpoints. A callback cannot add to the loss: that is for `training_step`.
    """

    def __init__(self, make: Make, *, model: str = "") -> None:
        self.make, self.path = make, model
        self.stabiliser = Stabiliser()
        self.pending: State = {}
        self.steps_seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stabiliser = self.make(pl_module.get_submodule(self.path), trainer.optimizers[0])
        self.steps_seen = trainer.global_step
        if self.pending:
            self.stabiliser.load_state_dict(self.pending)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object, **kwargs: object) -> None:
        if trainer.global_step == self.steps_seen:
            return  # gradients are still being gathered
        self.steps_seen = trainer.global_step
        self.stabiliser.step()
        if trainer.global_step % getattr(trainer, "log_every_n_steps", 50) == 0:
            pl_module.log_dict(self.stabiliser.metrics())

    def state_dict(self) -> State:
        return self.stabiliser.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        self.pending = state_dict  # Lightning restores callbacks before the optimiser exists


class LocAteRCallback(StabiliserCallback):
    """LocAteR's decoupled form; options as for `LocAteR`."""

    def __init__(self, *, model: str = "", **options: Any) -> None:
        super().__init__(lambda module, optimizer: LocAteR(module, optimizer=optimizer, **options), model=model)


@dataclass
class _Host:
    """Requests of actions to the Trainer."""

    trainer: Trainer

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self.trainer.optimizers)

    @property
    def others(self) -> list[Any]:
        """Schedulers, which are rolled back with the optimisers."""
        return [config.scheduler for config in self.trainer.lr_scheduler_configs]

    def stop(self) -> None:
        self.trainer.should_stop = True

    def save(self, path: Path | None) -> str:
        path = path or Path(self.trainer.default_root_dir) / "alarm.ckpt"
        self.trainer.save_checkpoint(path)
        return f"to {path}"


class AttentionCallback(Callback):
    """`Trainer(callbacks=[AttentionCallback(every=100)])`; options are the monitor's.

    Metrics go to the Trainer's loggers, alarms are printed, and `on_alarm` acts on the Trainer. `model` is the
    attribute that holds the transformer; without it the first child with a config is taken, or the module itself.
    `sample`, `heads` and `causal` are those of `locater.Live`, for a model that no table knows.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        sample: Any = None,
        heads: Sequence[Any] = (),
        causal: bool | None = None,
        **options: Any,
    ) -> None:
        self.path, self.options = model, options
        self.finding: dict[str, Any] = dict(sample=sample, heads=heads, causal=causal)
        self.monitor: AttentionMonitor | None = None
        self.report: Report | None = None
        self.state: State | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.monitor = AttentionMonitor(Live(self._model(pl_module), **self.finding), **self.options)
        self.monitor.host = _Host(trainer)
        if self.state is not None:
            self.monitor.load_state_dict(self.state)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on from the Trainer's step, with the optimisers that it has by now."""
        if self.monitor is not None and self.state is not None:
            self.monitor.num_steps = trainer.global_step
            for action in self.monitor.responses.all():
                action.resume(self.monitor.host)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object, **kwargs: object) -> None:
        # Accumulated batches leave the number of optimiser steps as it was.
        if self.monitor is None or trainer.global_step == self.monitor.num_steps:
            return
        report = self.monitor.step(trainer.global_step)
        if report is None:
            return
        self.report = report
        for logger in trainer.loggers:
            logger.log_metrics(report.metrics(), step=report.step)
        pl_module.log_dict(report.headline(), prog_bar=True, logger=False)
        if trainer.is_global_zero:
            for words in report.told():  # actions are in Python's log, which prints them
                print(f"step {report.step}: {words}", flush=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is not None:
            self.state = self.monitor.state_dict()
            self.monitor.__exit__(None, None, None)
            self.monitor = None

    def state_dict(self) -> State:
        return (self.state or {}) if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        self.state = state_dict or None

    def _model(self, module: nn.Module) -> nn.Module:
        if self.path is None:
            return _watched(module)
        named = getattr(module, self.path, None)
        if not isinstance(named, nn.Module):
            raise refusal(f"a module under the name {self.path}", type(named).__name__)
        return named


def _watched(module: nn.Module) -> nn.Module:
    """The module that a training step calls, where `model=` does not name it."""
    with_config = [child for child in module.children() if hasattr(child, "config")]
    if with_config or type(module).forward is not LightningModule.forward:
        return next(iter(with_config), module)
    return max(module.children(), key=lambda child: sum(one.numel() for one in child.parameters()), default=module)
