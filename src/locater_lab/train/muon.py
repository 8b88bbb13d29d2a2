"""Muon for the matrices inside the layers, AdamW for the rest, as one optimiser."""

from collections import defaultdict
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from locater.records import State


class MuonWithAdamW(Optimizer):
    """torch's own Muon on `matrices`, AdamW on `others`: one list of groups, one state.

    Muon's steps are scaled to the size of AdamW's ("match_rms_adamw"), so that both share a learning rate.
    """

    def __init__(
        self, matrices: list[Tensor], others: list[State], *, momentum: float, weight_decay: float, **adamw: Any
    ):
        rate = adamw["lr"]
        muon = Muon(matrices, lr=rate, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.parts = [muon, AdamW(others, **adamw)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        # The same dictionaries, not copies: who sets a learning rate here sets it there.
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state = defaultdict(dict)
        for part in self.parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The matrices inside the layers: no embedding, no output layer, nothing of one dimension."""
    layers = getattr(model, "layers", nn.ModuleList())
    return [one for one in layers.parameters() if one.requires_grad and one.dim() == 2]
