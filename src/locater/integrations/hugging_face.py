"""Stabilisers and the monitor in the Trainer of Hugging Face transformers, which stays as it is."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..models.sources import Live
from ..monitor.monitor import AttentionMonitor
from ..monitor.report import Report
from ..stabilisers import LocAteR, Stabiliser

Make = Callable[[nn.Module, Optimizer], Stabiliser]
FILE, MONITOR = "stabiliser.pt", "attention_monitor.pt"


class StabiliserCallback(TrainerCallback):
    """`Trainer(…, callbacks=[StabiliserCallback(make)])`, with `make(model, optimizer)` giving the stabiliser.

    Steps after each step of the optimiser, so gradient accumulation needs no care; one that mixed precision skipped
    is skipped here. Metrics join the Trainer's logs. Its state lies in each checkpoint, and a resumed run takes it
    up. A callback cannot add to the loss: stabilisers must act by `step()` or in the forward pass.
    """

    def __init__(self, make: Make) -> None:
        self.make = make
        self.stabiliser = Stabiliser()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stabiliser = self.make(kwargs["model"], kwargs["optimizer"])
        saved = _folder(args, state) / FILE
        if state.global_step and saved.exists():
            self.stabiliser.load_state_dict(torch.load(saved, weights_only=True))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if not getattr(kwargs["optimizer"], "step_was_skipped", False):
            self.stabiliser.step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            metrics = self.stabiliser.metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and (folder := _folder(args, state)).exists():
            torch.save(self.stabiliser.state_dict(), folder / FILE)


class LocAteRCallback(StabiliserCallback):
    """`Trainer(…, callbacks=[LocAteRCallback(strength=κ)])`: LocAteR's decoupled form; options as for `LocAteR`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda model, optimizer: LocAteR(model, optimizer=optimizer, **options))


def _folder(args: Any, state: TrainerState) -> Path:
    """Folder of the Trainer's checkpoint of the present step; a search of hyperparameters has one folder a trial."""
    folder, name = Path(args.output_dir), f"checkpoint-{state.global_step}"
    trials = folder.glob(f"*/{name}") if state.is_hyper_param_search else ()
    return max(trials, key=lambda path: path.stat().st_mtime, default=folder / name)


@dataclass
class _Host:
    """Requests of actions to the Trainer, by its own control."""

    control: TrainerControl
    optimizers: list[Any]
    others: list[Any]

    def stop(self) -> None:
        self.control.should_training_stop = True

    def save(self, path: Path | None) -> str:
        self.control.should_save = True
        return "by the trainer, as one of its own checkpoints"


def _host(control: TrainerControl, given: dict[str, Any]) -> _Host:
    parts = ([given[name]] if given.get(name) is not None else [] for name in ("optimizer", "lr_scheduler"))
    return _Host(control, *parts)


class AttentionCallback(TrainerCallback):
    """`Trainer(…, callbacks=[AttentionCallback(every=100, sinks=[Terminal()])])`; options are the monitor's.

    A step is an optimiser step, however many batches are accumulated. Metrics go through the Trainer's own `log`, so
    every tracker of `report_to` gets them; alarms are printed, and `on_alarm` acts by the Trainer's control. The
    monitor's state lies in each checkpoint, and a resumed run takes it up. `sample`, `heads` and `causal` are those of
    `locater.Live`, for a model that no table knows.
    """

    def __init__(self, *, sample: Any = None, heads: Sequence[Any] = (), causal: bool | None = None, **options: Any):
        self.finding: dict[str, Any] = dict(sample=sample, heads=heads, causal=causal)
        self.options = options
        self.monitor: AttentionMonitor | None = None
        self.report: Report | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert isinstance(kwargs["model"], nn.Module)
        self.monitor = AttentionMonitor(Live(kwargs["model"], **self.finding), **self.options)
        self.monitor.host = _host(control, kwargs)
        saved = _folder(args, state) / MONITOR
        if state.global_step and saved.exists():
            self.monitor.load_state_dict(torch.load(saved, weights_only=True))
        self.monitor.num_steps = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.monitor is not None
        self.monitor.host = _host(control, kwargs)
        report = self.monitor.step(state.global_step)
        if report is None:
            return
        self.report = report
        if (trainer := _trainer()) is not None:
            _log(trainer, report)
        if state.is_world_process_zero:
            for words in report.told():  # actions are in Python's log, which prints them
                print(f"step {report.step}: {words}", flush=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.monitor is not None and state.is_world_process_zero and (folder := _folder(args, state)).exists():
            torch.save(self.monitor.state_dict(), folder / MONITOR)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self.monitor is not None:
            self.monitor.__exit__(None, None, None)
            self.monitor = None


def _log(trainer: Trainer, report: Report) -> None:
    """Every number to the trackers and the history, three to what prints on the console."""
    handler = trainer.callback_handler
    every = handler.callbacks
    printing = [one for one in every if isinstance(one, PrinterCallback | ProgressCallback)]
    handler.callbacks = [one for one in every if not any(one is other for other in printing)]
    try:
        trainer.log(report.metrics())
    finally:
        handler.callbacks = every
    for callback in printing:
        callback.on_log(trainer.args, trainer.state, trainer.control, logs=report.headline())


def _trainer() -> Trainer | None:
    """The Trainer that is calling its callbacks: it gives them everything but itself."""
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(trainer := frame.f_locals.get("self"), Trainer):
            return trainer
        frame = frame.f_back
    return None
