"""Run on its own: the penalty inside a compiled loss, its gradient against the eager one; exits 1 on a gap."""

import torch

from locater.stabilisers import Constant, LocAteR, Penalised
from stabiliser_models import OwnAttention

# torch does not quote the path of its own libraries when it links what it has compiled.
BACKEND = "aot_eager" if " " in torch.__file__ else "inductor"
torch.set_num_threads(1)
torch.manual_seed(0)
model = OwnAttention().double()
locater = LocAteR(model, strength=0.5, mean=Penalised(0.3, Constant(1.0)), heads=model.heads)
x = torch.randn(2, 5, 16, dtype=torch.float64)


def loss(x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + locater.penalty()


parameters = list(model.parameters())
expected = torch.autograd.grad(loss(x), parameters)
found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend=BACKEND)(x), parameters)
for one, other in zip(found, expected, strict=True):
    torch.testing.assert_close(one, other)
