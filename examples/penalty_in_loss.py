"""LocAteR as a term of the loss, on attention that no table knows: its projections are named."""

import torch
from torch import nn
from torch.nn import functional

from locater.stabilisers import Constant, LocAteR, Penalised


class Attention(nn.Module):
    """Four query heads that share two keys."""

    def __init__(self) -> None:
        super().__init__()
        self.find, self.offer, self.value = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.find, self.offer, self.value))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


torch.manual_seed(0)
model = nn.ModuleDict({"attention": Attention()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# A small number: the loss of this example is of noise, so there is no share of a gradient to go by.
heads = [("attention.find", "attention.offer", 4, 2)]  # query, key, how many heads of each
locater = LocAteR(model, strength=1e-3, mean=Penalised(0.1, Constant(1.0)), heads=heads)

for _ in range(60):
    x = torch.randn(4, 16, 32)
    loss = model["attention"](x).square().mean()
    loss = loss + locater.penalty()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

for name, value in locater.metrics().items():
    print(f"{name} {value:.3f}")
