"""Cross entropy of a linear layer over many words, without holding all logits: −log softmax(W x)_target."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Logits held at once, in a block of memory that is used again and again: few enough for the processor's caches.
LOGITS_AT_ONCE = 2**23


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
        exact, narrow = weight.dtype, _product_dtype(weight)
        wide = torch.float64 if exact == torch.float64 else torch.float32
        by_x, by_weight = (torch.zeros_like(part) if wanted else None for part in (x, weight))
        total = torch.zeros((), device=x.device, dtype=wide)
        x_narrow, weight_narrow = x.to(narrow), weight.to(narrow)
        rows = min(len(x), max(64, LOGITS_AT_ONCE // len(weight) // 64 * 64))
        # Words down, tokens across: the products are quicker so.
        block = weight_narrow.new_empty(len(weight), rows)
        for start in range(0, len(x), rows):
            part, words = x_narrow[start : start + rows], targets[start : start + rows]
            logits = torch.mm(weight_narrow, part.mT, out=block[:, : len(part)]).to(wide)
            logits -= logits.amax(0)
            aimed = logits.gather(0, words[None]).sum()
            powers = logits.exp_()
            sums = powers.sum(0)[:, None]
            total += sums.log().sum() - aimed
            if by_x is not None and by_weight is not None:
                powers = powers.to(narrow)
                by_x[start : start + rows] = (powers.mT @ weight_narrow) / sums - weight[words]
                _add_product(by_weight, powers, (part / sums).to(narrow))
        if by_x is not None and by_weight is not None:
            by_weight.index_add_(0, targets, x.to(exact), alpha=-1)
            ctx.save_for_backward(by_x.div_(len(x)), by_weight.div_(len(x)))
        return total / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_loss: Tensor) -> tuple[Tensor | None, ...]:
        by_x, by_weight = ctx.saved_tensors
        return by_x * by_loss[0], by_weight * by_loss[0], None, None


def _product_dtype(weight: Tensor) -> torch.dtype:
    """What autocast would multiply in, which products into given memory do not ask."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a matrix between them where the types allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
