"""LocAteR: shrink the scale of each head's eigenspectrum, its mean free or held (Bao, Hataya, Karakida, ICML 2024)."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import refusal
from ..models.live.modules import Explicit
from ..models.live.rate_factor import Rates
from ..models.live.watch import Sample
from ..models.live.write_check import Optimizers, WriteCheck, forget_writer, note_writer
from ..records import State, head_key, layer_key
from .base import Stabiliser, non_negative
from .live.find import find_pairs
from .live.pairs import Pair
from .mean import Mean, Projected, as_mean
from .scales import Eta, Objective, Scale
from .strength import Auto, Gauge


class LocAteR(Stabiliser):
    """loss + κ Σ_heads η²(W), tr W of every head free, or held by `mean`: `penalty.py` on every head of a live model.

    In the loss: `loss = loss + locater.penalty()`. Decoupled, as AdamW does with weight decay: give the `optimizer`, or
    several, and `locater.step()` after `optimizer.step()` moves the weights by −lr·κ∇, without a graph; `penalty()` is
    then 0. Call `step()` in both forms when the mean is held by projection or warms up, or with `strength="auto"`,
    which sets κ in the first steps (`strength.py`). Heads are found as a scan finds them: by the model's family, by one
    pass over a batch (the `sample`, or that of the model's first call), or named (`heads`: see `locater.heads`).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float | str | Auto,
        scale: Scale | None = None,
        mean: Mean | float | str | None = None,
        optimizer: Optimizers | None = None,
        heads: Sequence[Explicit] = (),
        sample: Sample | None = None,
    ) -> None:
        self.auto = Auto() if strength == "auto" else strength if isinstance(strength, Auto) else None
        self.strength = 0.0 if self.auto else _number(strength)
        self.scale, self.mean = _checked(scale), as_mean(mean)
        self.optimizer = optimizer
        self.steps, self._in_loss = 0, False
        self.pairs: list[Pair] = []
        self.gauge: Gauge | None = None
        self.begin(model, partial(self._find, model, heads), sample, heads)

    def _find(self, model: nn.Module, heads: Sequence[Explicit], sample: Sample | None) -> None:
        self.pairs = find_pairs(model, heads=heads, sample=sample, latent=True, by_scale=True)
        leaves = {name: leaf for pair in self.pairs for name, leaf in pair.leaves().items()}
        self.initial = [self._initial(number) for number in range(len(self.pairs))]
        self.gauge = Gauge(self.pairs, self.optimizer, self._slopes) if self.auto else None
        writes = leaves.values() if self.optimizer is not None or isinstance(self.mean, Projected) else ()
        remedy = "add penalty() to the loss, and hold a mean by Penalised(…) there"
        self.writes = WriteCheck(writes, self.optimizer, remedy)
        if self.optimizer is not None:
            self._check_owner(self.optimizer, leaves)
        note_writer(model, self)

    def __repr__(self) -> str:
        """With κ as it is now."""
        chosen = "" if self.auto is None else f" (auto, {'chosen' if self.auto.is_done else 'not settled yet'})"
        parts = f"strength={self.strength:.3g}{chosen}", f"scale={type(self.scale).__name__}"
        decoupled = "decoupled" if self.optimizer is not None else "in the loss"
        return f"LocAteR({', '.join(parts)}, mean={type(self.mean).__name__}, {decoupled})"

    def penalty(self) -> Float[Tensor, ""]:
        """κ Σ_heads scale(W), and the mean's penalty if it has one; 0 where the optimiser was given."""
        self._in_loss = True
        self.check_found("a penalty")
        if self.optimizer is not None:
            return torch.zeros((), device=self.pairs[0].weights()[0].device)
        values = [pair.value(self._objective(number)) for number, pair in enumerate(self.pairs)]
        total = torch.stack(values).sum()
        if self.gauge is not None and total.requires_grad:
            self.gauge.listen(total, self.strength)
        if not torch.compiler.is_compiling():
            _check_finite(torch.isfinite(total.detach()))
        return total

    @torch.no_grad()
    def step(self) -> None:
        """Shrink the scale if an optimiser was given, then hold the mean. Refuses NaN."""
        if self.optimizer is None and not self._in_loss:
            raise refusal("penalty() in the loss, or an optimiser", "neither", "LocAteR(model, …, optimizer=optimizer)")
        self.check_found("a step")
        self.writes.check()
        self.steps += 1
        if self.gauge is not None and self.auto is not None:  # κ holds for the step that follows
            self.auto.add(self.gauge.read())
            self._settle(self.auto)
        if self.optimizer is not None:
            rates = Rates(self.optimizer)
            finite = [pair.descend(self._objective(n), rates) for n, pair in enumerate(self.pairs)]
            _check_finite(torch.stack(finite))
        for number, pair in enumerate(self.pairs):
            if (target := self.targets(number)) is not None:
                self.mean.restore(pair, target)

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        """`qk/layer_03/xi`, `…/eta` and `…/trace` (in units of λ): means over a layer's heads.

        With `heads` each head's own as well: `qk/layer_03/head_05/xi`. With `strength="auto"` κ, as `qk/strength`.
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
        chosen = {} if self.auto is None else {"qk/strength": self.strength}
        return chosen | means | (single if heads else {})

    def state_dict(self) -> State:
        if self.waiting is not None:
            return self.pending or {}
        state = {"steps": self.steps, "initial": [values.clone() for values in self.initial]}
        return state | ({"auto": self.auto.state_dict()} if self.auto else {})

    def load_state_dict(self, state: State) -> None:
        """Refuses the state of a model with other heads, or of a strength that was chosen where this one is given."""
        if self.waiting is not None:
            self.pending = state
            return
        if self.auto is not None and "auto" not in state:
            raise refusal('the state of strength="auto"', "that of a number", "give that number")
        shapes = [tuple(values.shape) for values in state["initial"]]
        if shapes != [pair.shape for pair in self.pairs]:
            raise refusal("the state of a model with these heads", f"one of {len(shapes)} attention modules")
        if self.auto is not None:
            self.auto.load_state_dict(state["auto"])
            self._settle(self.auto)
        self.steps = int(state["steps"])
        self.initial = [values.to(own).clone() for values, own in zip(state["initial"], self.initial, strict=True)]

    def targets(self, number: int) -> Float[Tensor, "groups heads"] | None:
        """The wanted tr W of a pair's heads now, in the units of W; None where the mean is free."""
        target = self.mean.target
        wanted = None if target is None else target.at(self.steps, self.initial[number])
        return None if wanted is None else wanted * self.pairs[number].temperature

    def _settle(self, auto: Auto) -> None:
        """Update κ; detach the hooks when it is settled."""
        self.strength = auto.strength
        if auto.is_done and self.gauge is not None:
            self.gauge.close()
            self.gauge = None

    def _slopes(self, number: int) -> list[Tensor]:
        """The gradient of a pair's scale alone, by its parameters."""
        return self.pairs[number].slopes(self.scale)

    def detach(self) -> None:
        """Nothing of it is in the model, but for the ears of the first steps."""
        super().detach()
        forget_writer(self)
        if self.pairs:
            self.writes.close()
        if self.gauge is not None:
            self.gauge.close()

    def _objective(self, number: int) -> Objective:
        target = self.targets(number)
        mean = None if target is None else self.mean.term(target, self.pairs[number].temperature)
        return Objective(self.scale, self.strength, mean)

    @torch.no_grad()
    def _initial(self, number: int) -> Float[Tensor, "groups heads"]:
        """tr W / λ of all heads, on every rank."""
        values = self.pairs[number].traces() / self.pairs[number].temperature
        _check_finite(torch.isfinite(values))
        return values

    @torch.no_grad()
    def _numbers(self, number: int) -> dict[str, list[float]]:
        moments, temperature = self.pairs[number].moments(), self.pairs[number].temperature
        numbers = {"xi": moments.xi, "eta": moments.eta, "trace": moments.trace / temperature}
        return {name: values.flatten().tolist() for name, values in numbers.items()}

    def _check_owner(self, optimizer: Optimizers, leaves: Mapping[str, Tensor]) -> None:
        rates = Rates(optimizer)
        for name, leaf in leaves.items():
            rates.learning_rate(leaf, name)
        acts = self.auto is not None or self.strength > 0
        if acts and any(map(rates.is_orthogonalised, leaves.values())):
            message = "Muon's steps are of one size, and −lr·κ∇ is lost next to them: add penalty() to the loss instead"
            warnings.warn(message, stacklevel=3)


def _number(strength: float | str | Auto) -> float:
    if isinstance(strength, str | Auto):
        raise refusal('a strength that is a number or "auto"', repr(strength))
    return non_negative(strength, "strength")


def _checked(scale: Scale | None) -> Scale:
    if scale is None or isinstance(scale, Scale):
        return scale or Eta()
    remedy = "derive it from locater.stabilisers.Scale, with a method `value`"
    raise refusal("a scale such as Eta()", repr(scale), remedy)


def _check_finite(good: Tensor) -> None:
    if not bool(good.all()):
        remedy = "the run has diverged: go back to a checkpoint"
        raise refusal("finite query and key weights", "NaN or infinity", remedy)
