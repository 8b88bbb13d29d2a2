"""Cross entropy of a linear layer over many words, without holding all logits: −log softmax(W x)_target."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Logits held at once: few enough for the processor's caches, and for a block of memory that is used again and again.
LOGITS_AT_ONCE = 2**22


def linear_cross_entropy(
    x: Float[Tensor, "tokens d_model"], weight: Float[Tensor, "words d_model"], targets: Int[Tensor, " tokens"]
) -> Float[Tensor, ""]:
    """The mean over tokens. Some rows at a time, each with its gradient in the same pass: O(rows·words) memory.

    With e = exp(logit − largest) and Z = Σ e, the gradient is (e/Z − 1 at the target): Z divides the d_model numbers of
    a token in place of its many e, and the target's one is taken from the result, so e is the only large matrix.
    """
    if torch.compiler.is_compiling():
        return functional.cross_entropy(functional.linear(x, weight).float(), targets)
    return _Function.apply(x, weight, targets, torch.is_grad_enabled())


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, wanted: bool) -> Tensor:
        rows = max(64, LOGITS_AT_ONCE // len(weight))
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        by_x, by_weight = (torch.zeros_like(part) if wanted else None for part in (x, weight))
        total = torch.zeros((), device=x.device, dtype=wide)
        for start in range(0, len(x), rows):
            part, words = x[start : start + rows], targets[start : start + rows]
            logits = functional.linear(part, weight).to(wide)
            logits -= logits.amax(-1, keepdim=True)
            aimed = logits.gather(-1, words[:, None]).sum()
            powers = logits.exp_()
            sums = powers.sum(-1, keepdim=True)
            total += sums.log().sum() - aimed
            if by_x is not None and by_weight is not None:
                powers = powers.to(weight.dtype)
                by_x[start : start + rows] = (powers @ weight) / sums - weight[words]
                by_weight += powers.mT @ (part / sums).to(weight.dtype)
        if by_x is not None and by_weight is not None:
            by_weight.index_add_(0, targets, x.to(weight.dtype), alpha=-1)
            ctx.save_for_backward(by_x.div_(len(x)), by_weight.div_(len(x)))
        return total / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_loss: Tensor) -> tuple[Tensor | None, ...]:
        by_x, by_weight = ctx.saved_tensors
        return by_x * by_loss[0], by_weight * by_loss[0], None, None
