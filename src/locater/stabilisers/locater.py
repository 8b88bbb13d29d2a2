"""LocAteR: shrink the scale of each head's eigenspectrum, hold its mean (Bao, Hataya, Karakida, ICML 2024)."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import refusal
from ..models import Family
from ..models.live.explicit import Explicit
from .base import Stabiliser, learning_rate, learning_rates, non_negative
from .energy import Terms, energy
from .live.gains import Inputs, Raw
from .live.pairs import Pair, find_pairs
from .live.sharding import part_of
from .measures import pair_metrics
from .projection import hold_trace, traces
from .scales import Eta, Functional
from .shrink import shrink
from .targets import Free, Mean, Penalty, Projection


class LocAteR(Stabiliser):
    """loss + κ Σ_heads η²(W), with tr W of every head held by `mean`.

    In the loss: `loss = loss + locater.penalty()`. Decoupled, as AdamW does with weight decay: give the `optimizer`,
    and `locater.step()` after `optimizer.step()` moves the weights by −lr·κ∇, without a graph; `penalty()` is then 0.
    Call `step()` in both forms when the mean is held by projection or warms up. Heads are found as a scan finds
    them, or named: `heads=[(query, key, num_heads, num_key_heads), …]`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float,
        scale: Functional | None = None,
        mean: Mean | None = None,
        optimizer: Optimizer | None = None,
        heads: Sequence[Explicit] = (),
        family: Family | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.strength = non_negative(strength, "strength")
        self.scale, self.mean, self.inputs = scale or Eta(), mean or Free(), inputs or Raw()
        self.pairs = find_pairs(model, heads=heads, family=family)
        self.inputs.find(model, self.pairs, heads=heads, family=family)
        self.optimizer = optimizer
        if optimizer is not None:
            self._check_owner(optimizer)
        self.steps, self._in_loss = 0, False
        self.initial = [self._initial(number) for number in range(len(self.pairs))]

    def penalty(self) -> Float[Tensor, ""]:
        """κ Σ_heads scale(W), and the mean's penalty if it has one; 0 where the optimiser was given."""
        self._in_loss = True
        if self.optimizer is not None:
            return torch.zeros((), device=self.pairs[0].weights()[0].device)
        total = torch.stack([energy(pair, self._terms(number)) for number, pair in enumerate(self.pairs)]).sum()
        if not torch.compiler.is_compiling():
            self._check_finite(total)
        return total

    @torch.no_grad()
    def step(self) -> None:
        """Shrink the scale if an optimiser was given, then hold the mean. Refuses NaN."""
        if self.optimizer is None and not self._in_loss:
            raise refusal("penalty() in the loss, or an optimiser", "neither", "LocAteR(model, …, optimizer=optimizer)")
        self.steps += 1
        rates = {} if self.optimizer is None else learning_rates(self.optimizer)
        if self.optimizer is not None:
            finite = [shrink(pair, self._terms(number), rates) for number, pair in enumerate(self.pairs)]
            self._check_finite(torch.stack(finite))
        if isinstance(self.mean, Projection):
            for number, pair in enumerate(self.pairs):
                if (targets := self.targets(number)) is not None:
                    self._project(number, pair, targets)

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        """`qk/layer_03/xi`, `…/eta` and `…/trace` (in units of λ): means over a layer's heads, or each head's own."""
        return pair_metrics(self.pairs, [self.inputs.gain(n) for n in range(len(self.pairs))], heads=heads)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "initial": [values.clone() for values in self.initial]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuses the state of a model with other heads."""
        shapes = [tuple(values.shape) for values in state["initial"]]
        if shapes != [pair.shape for pair in self.pairs]:
            raise refusal("the state of a model with these heads", f"one of {len(shapes)} attention modules")
        self.steps = int(state["steps"])
        self.initial = [values.to(own).clone() for values, own in zip(state["initial"], self.initial, strict=True)]

    def targets(self, number: int) -> Float[Tensor, "groups heads"] | None:
        """The wanted tr W of a pair's heads now, in the units of W; None where the mean is free."""
        target = self.mean.target
        wanted = None if target is None else target.at(self.steps, self.initial[number])
        return None if wanted is None else wanted * self.pairs[number].temperature

    def _terms(self, number: int) -> Terms:
        weight = self.mean.weight if isinstance(self.mean, Penalty) else 0.0
        targets = self.targets(number) if weight else None
        return Terms(self.scale, self.strength, 0.0 if targets is None else weight, targets, self.inputs.gain(number))

    @torch.no_grad()
    def _initial(self, number: int) -> Float[Tensor, "groups heads"]:
        """tr W / λ of all heads, on every rank."""
        pair = self.pairs[number]
        part = part_of(pair, pair.weights())
        values = part.everywhere(traces(part, self.inputs.gain(number))) / pair.temperature
        return self._check_finite(values)

    def _project(self, number: int, pair: Pair, targets: Float[Tensor, "groups heads"]) -> None:
        weights = pair.weights()
        if not pair.is_stored:
            raise refusal("plain parameters to project", f"computed ones in {pair.name}", "hold the mean by Penalty(…)")
        part = part_of(pair, weights)
        moves = weights[0].requires_grad, weights[-1].requires_grad
        hold_trace(part, targets[part.groups], moves=moves, gain=self.inputs.gain(number))
        part.commit()

    def _check_owner(self, optimizer: Optimizer) -> None:
        rates = learning_rates(optimizer)
        for pair in self.pairs:
            for grid, weight in zip((pair.query, pair.key), pair.weights(), strict=False):
                if grid.place.is_stored and weight.requires_grad:
                    learning_rate(rates, weight, grid.place.name)

    @staticmethod
    def _check_finite(values: Tensor) -> Tensor:
        """Refuses values that are not finite, or flags that are not all set."""
        good = values if values.dtype == torch.bool else torch.isfinite(values.detach())
        if not bool(good.all()):
            raise refusal(
                "finite query and key weights", "NaN or infinity", "the run has diverged: go back to a checkpoint"
            )
        return values
