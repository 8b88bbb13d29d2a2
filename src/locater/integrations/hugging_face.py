"""Stabilisers in the Trainer of Hugging Face transformers, which stays as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from ..stabilisers import LocAteR, Stabiliser

Make = Callable[[nn.Module, Optimizer], Stabiliser]
FILE = "stabiliser.pt"


class StabiliserCallback(TrainerCallback):
    """`Trainer(…, callbacks=[StabiliserCallback(make)])`, with `make(model, optimizer)` giving the stabiliser.

    Steps after each step of the optimiser, so gradient accumulation needs no care; one that mixed precision skipped
    is skipped here. Metrics join the Trainer's logs. Its state lies in each checkpoint, and a resumed run takes it
    up. A callback cannot add to the loss: stabilisers must act by `step()` or in the forward pass.
    """

    def __init__(self, make: Make) -> None:
        self.make = make
        self.stabiliser = Stabiliser()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stabiliser = self.make(kwargs["model"], kwargs["optimizer"])
        saved = _folder(args, state) / FILE
        if state.global_step and saved.exists():
            self.stabiliser.load_state_dict(torch.load(saved, weights_only=True))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not getattr(kwargs["optimizer"], "step_was_skipped", False):
            self.stabiliser.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            metrics = self.stabiliser.metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and (folder := _folder(args, state)).exists():
            torch.save(self.stabiliser.state_dict(), folder / FILE)


class LocAteRCallback(StabiliserCallback):
    """`Trainer(…, callbacks=[LocAteRCallback(strength=κ)])`: LocAteR's decoupled form; options as for `LocAteR`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda model, optimizer: LocAteR(model, optimizer=optimizer, **options))


def _folder(args: Any, state: Any) -> Path:
    """Where the Trainer keeps the checkpoint of the present step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
