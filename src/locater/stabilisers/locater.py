"""LocAteR: shrink the scale of each head's eigenspectrum, hold its mean (Bao, Hataya, Karakida, ICML 2024)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import refusal
from ..models import Family
from ..models.live.explicit import Explicit
from ..models.live.watch import Sample
from ..records import State, head_key, layer_key
from .base import Rates, Stabiliser, non_negative
from .live import descent
from .live.gains import Inputs, Raw
from .live.pairs import find_pairs
from .live.sharding import shard_of
from .mean import Mean, as_mean, traces
from .scales import Eta, Objective, Scale


class LocAteR(Stabiliser):
    """loss + κ Σ_heads η²(W), with tr W of every head held by `mean`: `penalty.py` on every head of a live model.

    In the loss: `loss = loss + locater.penalty()`. Decoupled, as AdamW does with weight decay: give the `optimizer`,
    and `locater.step()` after `optimizer.step()` moves the weights by −lr·κ∇, without a graph; `penalty()` is then 0.
    Call `step()` in both forms when the mean is held by projection or warms up. Heads are found as a scan finds
    them: by the model's family, by one pass over a batch (`sample`), or named (`heads`: see `locater.heads`).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float,
        scale: Scale | None = None,
        mean: Mean | float | str | None = None,
        optimizer: Optimizer | None = None,
        heads: Sequence[Explicit] = (),
        sample: Sample | None = None,
        family: Family | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.strength = non_negative(strength, "strength")
        self.scale, self.mean, self.inputs = _checked(scale), as_mean(mean), inputs or Raw()
        self.pairs = find_pairs(model, heads=heads, sample=sample, family=family)
        self.inputs.find(model, self.pairs, heads=heads, sample=sample, family=family)
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
        values = [descent.value(pair, *self._objective(number)) for number, pair in enumerate(self.pairs)]
        total = torch.stack(values).sum()
        if not torch.compiler.is_compiling():
            _check_finite(torch.isfinite(total.detach()))
        return total

    @torch.no_grad()
    def step(self) -> None:
        """Shrink the scale if an optimiser was given, then hold the mean. Refuses NaN."""
        if self.optimizer is None and not self._in_loss:
            raise refusal("penalty() in the loss, or an optimiser", "neither", "LocAteR(model, …, optimizer=optimizer)")
        self.steps += 1
        if self.optimizer is not None:
            rates = Rates(self.optimizer)
            finite = [descent.descend(pair, *self._objective(n), rates) for n, pair in enumerate(self.pairs)]
            _check_finite(torch.stack(finite))
        for number, pair in enumerate(self.pairs):
            if (target := self.targets(number)) is not None:
                self.mean.restore(pair, target, self.inputs.gain(number))

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        """`qk/layer_03/xi`, `…/eta` and `…/trace` (in units of λ): means over a layer's heads.

        With `heads` each head's own as well: `qk/layer_03/head_05/xi`.
        """
        several = len({pair.block for pair in self.pairs}) > 1
        by_layer: dict[str, list[float]] = {}
        single: dict[str, float] = {}
        for number, pair in enumerate(self.pairs):
            layer = layer_key(pair.layer, block=pair.block if several else "")
            for name, values in self._numbers(number).items():
                by_layer.setdefault(f"qk/{layer}/{name}", []).extend(values)
                single |= {f"qk/{layer}/{head_key(pair.first + n)}/{name}": value for n, value in enumerate(values)}
        means = {key: sum(values) / len(values) for key, values in by_layer.items()}
        return means | single if heads else means

    def state_dict(self) -> State:
        return {"steps": self.steps, "initial": [values.clone() for values in self.initial]}

    def load_state_dict(self, state: State) -> None:
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

    def _objective(self, number: int) -> tuple[Objective, Tensor | None]:
        """What a pair's heads descend on, and the gain that is folded into them."""
        target = self.targets(number)
        mean = None if target is None else self.mean.term(target, self.pairs[number].temperature)
        return Objective(self.scale, self.strength, mean), self.inputs.gain(number)

    @torch.no_grad()
    def _initial(self, number: int) -> Float[Tensor, "groups heads"]:
        """tr W / λ of all heads, on every rank."""
        pair = self.pairs[number]
        shard = shard_of(pair, pair.weights())
        values = shard.everywhere(traces(shard, shard.own(self.inputs.gain(number)))) / pair.temperature
        _check_finite(torch.isfinite(values))
        return values

    @torch.no_grad()
    def _numbers(self, number: int) -> dict[str, list[float]]:
        pair = self.pairs[number]
        shard = shard_of(pair, pair.weights())
        moments = descent.moments_at(shard, self.inputs.gain(number))
        numbers = {"xi": moments.xi, "eta": moments.eta, "trace": moments.trace / pair.temperature}
        return {name: shard.everywhere(values).flatten().tolist() for name, values in numbers.items()}

    def _check_owner(self, optimizer: Optimizer) -> None:
        rates = Rates(optimizer)
        for pair in self.pairs:
            for rows, weight in zip(pair.sides, pair.weights(), strict=False):
                if rows.weight.is_stored and weight.requires_grad:
                    rates.learning_rate(weight, rows.weight.name)


def _checked(scale: Scale | None) -> Scale:
    if scale is None or isinstance(scale, Scale):
        return scale or Eta()
    remedy = "derive it from locater.stabilisers.Scale, with a method `value`"
    raise refusal("a scale such as Eta()", repr(scale), remedy)


def _check_finite(good: Tensor) -> None:
    if not bool(good.all()):
        remedy = "the run has diverged: go back to a checkpoint"
        raise refusal("finite query and key weights", "NaN or infinity", remedy)
