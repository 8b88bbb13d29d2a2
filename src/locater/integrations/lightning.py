"""Stabilisers in the Trainer of Lightning."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

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
        self.pending: dict[str, Any] = {}
        self.steps_seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stabiliser = self.make(pl_module.get_submodule(self.path), trainer.optimizers[0])
        self.steps_seen = trainer.global_step
        if self.pending:
            self.stabiliser.load_state_dict(self.pending)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.steps_seen:
            return  # gradients are still being gathered
        self.steps_seen = trainer.global_step
        self.stabiliser.step()
        if trainer.global_step % getattr(trainer, "log_every_n_steps", 50) == 0:
            pl_module.log_dict(self.stabiliser.metrics())

    def state_dict(self) -> dict[str, Any]:
        return self.stabiliser.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pending = state_dict  # Lightning restores callbacks before the optimiser exists


class LocAteRCallback(StabiliserCallback):
    """LocAteR's decoupled form; options as for `LocAteR`."""

    def __init__(self, *, model: str = "", **options: Any) -> None:
        super().__init__(lambda module, optimizer: LocAteR(module, optimizer=optimizer, **options), model=model)
