"""LocAteR in the Trainer of Lightning: one callback."""

import logging
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from locater.integrations.lightning import LocAteRCallback
from locater.stabilisers import Projected, WarmUp

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder, self.output = nn.TransformerEncoder(layer, 2), nn.Linear(32, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.output(self.encoder(batch)).mean((1, 2)) - batch.mean((1, 2))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
locater = LocAteRCallback(model="encoder", strength="auto", mean=Projected(WarmUp(1.0, steps=5)))
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(max_steps=10, accelerator="cpu", accumulate_grad_batches=2, callbacks=[locater], **options)
trainer.fit(Classifier(), DataLoader(torch.randn(160, 8, 32), batch_size=8))

for name, value in locater.stabiliser.metrics().items():
    print(f"{name} {value:.3f}")
