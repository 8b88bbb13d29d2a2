"""The paper's probability met in training: how often a gradient passes token t of a walk, against ρ_t."""

import torch
from jaxtyping import Float
from torch import Tensor

from ..theory import closed_form, exact
from ..theory.clipped_softmax import clipped_linear
from .data.batches import Batches
from .model import WalkHead, WalkModel

WALKS_AT_ONCE = 256


@torch.enable_grad()
def passes(logits: Float[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens"]:
    """1 where the derivative of S(ω)_t by its own logit is not zero, by autograd through the clipped softmax."""
    deviation = logits.detach().clone().requires_grad_()
    found = clipped_linear(deviation)
    total = torch.zeros_like(logits)
    for t in range(logits.shape[1]):
        (gradient,) = torch.autograd.grad(found[:, t].sum(), deviation, retain_graph=True)
        total[:, t] = (gradient[:, t] != 0).to(total)
    return total


def propagation(model: WalkModel, batches: Batches, *, num_walks: int = 512) -> dict[str, list[float]]:
    """Measured share per position with its standard error, and ρ_t by the closed form and exactly."""
    layer = model.layers[0]
    head = layer.attention
    assert isinstance(head, WalkHead)
    shares = []
    with torch.no_grad():
        for first in range(0, num_walks, WALKS_AT_ONCE):
            walk, _ = batches.validation(first, min(WALKS_AT_ONCE, num_walks - first))
            shares.append(passes(head.logits(walk.to(head.query.weight))))
        measured = torch.cat(shares).mean(0)
        weights = head.query.weight.detach().double().cpu(), head.key.weight.detach().double().cpu()
        length = measured.shape[0]
        return {
            "measured": measured.tolist(),
            "standard_error": (measured * (1 - measured) / num_walks).sqrt().tolist(),
            "closed": closed_form.profile(*weights, length=length).tolist(),
            "exact": exact.profile(*weights, length=length).tolist(),
        }
