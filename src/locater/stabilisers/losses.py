"""Rivals in the loss: what attention does, gathered while the model runs, and decay of queries and keys."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..attention.calls import AttentionCall, in_backward
from ..errors import refusal
from ..models.live.modules import Explicit
from ..models.live.rate_factor import Rates
from ..models.live.watch import Sample
from ..models.live.write_check import Optimizers, WriteCheck
from .base import Stabiliser, non_negative
from .live.find import find_pairs
from .live.looking import Looker
from .live.pairs import Pair, check_stored
from .live.weights import Rows

RECOMPUTED = "recompute activations by checkpoint(…, use_reentrant=False)"


class AttentionLoss(Looker):
    """weight · mean over layers, heads and queries of a number of the logits, since the last `penalty()`.

    Cost: the logits are materialised next to the model's own attention, O(T²) memory per layer. Queries without a key
    do not count, and recomputation of activations does not count twice.
    """

    of_passes = True

    def __init__(
        self, model: nn.Module, *, weight: float, heads: Sequence[Explicit] = (), sample: Sample | None = None
    ) -> None:
        self.weight = non_negative(weight, "weight")
        self.gathered: dict[str, list[Tensor]] = {}
        self.last: dict[str, float] = {}
        self.pairs: list[Pair] = []
        self.begin(model, partial(self._find, model, heads), sample, heads)

    def _find(self, model: nn.Module, heads: Sequence[Explicit], sample: Sample | None) -> None:
        self.pairs = find_pairs(model, heads=heads, sample=sample, trained=False, latent=True)
        self.look(model, self.pairs)

    def number(self, logits: Float[Tensor, "*batch heads queries keys"]) -> Float[Tensor, "*batch heads queries"]:
        """One number per query; each has at least one key, and −∞ stands where there is none."""
        raise NotImplementedError

    def attend(self, name: str, call: AttentionCall) -> None:
        logits = call.final()
        none = (logits == -torch.inf).all(-1)  # padding: filled before any softmax, whose gradient is NaN there
        numbers = self.number(logits.masked_fill(none[..., None], 0.0)).masked_fill(none, 0.0)
        mean = numbers.sum() / (~none).sum().clamp(min=1)
        # A pass inside backward recomputes one that was counted; it must save the same tensors all the same.
        if not in_backward():
            self.gathered.setdefault(name, []).append(mean)
        elif name not in self.gathered and name not in self.last:
            raise refusal("passes with gradients", f"{name} run without, and again in backward", RECOMPUTED)

    def penalty(self) -> Float[Tensor, ""]:
        """Return the loss that the passes since the last call have gathered."""
        self.check_found("a penalty")
        means = {name: torch.stack(values).mean() for name, values in self.gathered.items()}
        self.gathered.clear()
        if not means:
            return torch.zeros(())
        self.last = {name: float(mean.detach()) for name, mean in means.items()}
        return self.weight * torch.stack(list(means.values())).mean()

    def detach(self) -> None:
        super().detach()
        self.gathered.clear()


class ZLoss(AttentionLoss):
    """weight · mean (log Σ_t e^{ω_t})²: holds logits near zero, in sum, without a word on how they are spread.

    After the router's z-loss of Zoph et al. 2022 (arXiv 2202.08906) and the output's of Chowdhery et al. 2022 (PaLM).
    """

    def number(self, logits: Float[Tensor, "*batch heads queries keys"]) -> Float[Tensor, "*batch heads queries"]:
        return logits.logsumexp(-1).square()


class EntropyBonus(AttentionLoss):
    """−weight · mean entropy, log Σe^ω − Σ p ω in nats: the loss falls as attention spreads.

    Attanasio et al. 2022 (EAR, arXiv 2203.09192).
    """

    def number(self, logits: Float[Tensor, "*batch heads queries keys"]) -> Float[Tensor, "*batch heads queries"]:
        finite = logits.masked_fill(logits == -torch.inf, 0.0)  # p is 0 there; 0·∞ would poison the gradient
        return (logits.softmax(-1) * finite).sum(-1) - logits.logsumexp(-1)


IN_LOSS = "leave out the optimizer and add penalty() to the loss"


class QKDecay(Stabiliser):
    """With an optimiser, W −= lr·decay·W after its step; without, penalty decay/2 · (‖W_Q‖² + ‖W_K‖²)."""

    def __init__(
        self,
        model: nn.Module,
        *,
        decay: float,
        optimizer: Optimizers | None = None,
        heads: Sequence[Explicit] = (),
        sample: Sample | None = None,
    ) -> None:
        self.decay, self.optimizer = non_negative(decay, "decay"), optimizer
        self.pairs: list[Pair] = []
        self.begin(model, partial(self._find, model, heads), sample, heads)

    def _find(self, model: nn.Module, heads: Sequence[Explicit], sample: Sample | None) -> None:
        self.pairs = find_pairs(model, heads=heads, sample=sample)
        if self.optimizer is not None:
            check_stored(self.pairs, "decay", IN_LOSS)
            leaves = [leaf for pair in self.pairs for leaf in pair.leaves().values()]
            self.writes = WriteCheck(leaves, self.optimizer, IN_LOSS)

    def penalty(self) -> Float[Tensor, ""]:
        self.check_found("a penalty")
        if self.optimizer is not None:
            return torch.zeros(())
        sides = [side for pair in self.pairs for side in _sides(pair)]
        if any(isinstance(weight, DTensor) for _, weight in sides):
            raise refusal("plain weights for a decay in the loss", "sharded ones", "give the optimizer: decoupled")
        return self.decay / 2 * torch.stack([rows.view(weight).square().sum() for rows, weight in sides]).sum()

    @torch.no_grad()
    def step(self) -> None:
        if self.optimizer is None:
            return
        self.check_found("a step")
        self.writes.check()
        rates = Rates(self.optimizer)
        for pair in self.pairs:
            shard = pair.shard(exact=True)
            for heads, (rows, weight) in zip((shard.query, shard.key), _sides(pair), strict=True):
                if weight.requires_grad:
                    heads.mul_(1 - self.decay * rates.learning_rate(weight, rows.weight.name))
            shard.commit()


def _sides(pair: Pair) -> tuple[tuple[Rows, Tensor], tuple[Rows, Tensor]]:
    weights = pair.weights()
    return (pair.query, weights[0]), (pair.key, weights[-1])
