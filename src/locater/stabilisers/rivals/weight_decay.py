"""Weight decay on queries and keys only, decoupled (Loshchilov & Hutter 2019, arXiv 1711.05101) or in the loss."""

from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import refusal
from ...models.live.explicit import Explicit
from ...models.live.watch import Sample
from ...models.live.write_check import Optimizers, WriteCheck
from ..base import Rates, Stabiliser, non_negative
from ..live.find import find_pairs
from ..live.pairs import Pair, check_stored
from ..live.sharding import shard_of
from ..live.weights import Rows

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
            shard = shard_of(pair, pair.weights(), exact=True)
            for heads, (rows, weight) in zip((shard.query, shard.key), _sides(pair), strict=True):
                if weight.requires_grad:
                    heads.mul_(1 - self.decay * rates.learning_rate(weight, rows.weight.name))
            shard.commit()

    def detach(self) -> None:
        self.stop_waiting()


def _sides(pair: Pair) -> tuple[tuple[Rows, Tensor], tuple[Rows, Tensor]]:
    weights = pair.weights()
    return (pair.query, weights[0]), (pair.key, weights[-1])
