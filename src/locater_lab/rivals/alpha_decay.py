"""AlphaDecay: more weight decay for the weights whose spectrum has a lighter tail.

He et al. 2025, arXiv 2506.14562.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.errors import refusal
from locater.models.live.masters import current, write
from locater.models.live.write_check import WriteCheck
from locater.projections import whole, widen
from locater.records import State
from locater.stabilisers.base import Rates, Stabiliser, non_negative
from locater.stabilisers.rivals.reparametrisation import linear_weights

LIGHTEST = 1e3  # α of a spectrum without any tail, where Hill's estimate has no bound


class AlphaDecay(Stabiliser):
    """W −= lr·decay·s·W after the optimiser's step, s linear in α from `lowest` to `highest` over all linear weights.

    α is the tail index of the squared singular values (`tail_index`), measured anew after every `every` steps;
    embeddings, and an output layer tied to them, are left alone. Give the optimiser itself no weight decay for these
    weights. Cost: the eigenvalues of all W W^T once in `every` steps; under FSDP2 each weight is gathered for that.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer,
        decay: float = 0.1,
        lowest: float = 2 / 3,
        highest: float = 5.0,
        every: int = 500,
    ) -> None:
        if every < 1:
            raise refusal("to measure at most once in a step", every, "give every=1 or more")
        self.decay, self.optimizer, self.every = non_negative(decay, "decay"), optimizer, every
        self.lowest, self.highest = non_negative(lowest, "lowest share"), non_negative(highest, "highest share")
        names = {id(module): name for name, module in model.named_modules()}
        found = [(f"{names[id(module)]}.{name}", module, name) for module, name in linear_weights(model)]
        self.places = [place for place in found if getattr(place[1], place[2]).requires_grad]
        if not self.places:
            raise refusal("a model with linear layers that are trained", type(model).__name__)
        remedy = "give the decay to the optimiser"
        self.writes = WriteCheck((getattr(module, name) for _, module, name in self.places), optimizer, remedy)
        rates = Rates(optimizer)
        for name, module, attribute in self.places:
            rates.learning_rate(getattr(module, attribute), name)
        self.steps = 0
        self.alphas = torch.zeros(len(self.places), dtype=torch.float64)
        self._measure()

    @torch.no_grad()
    def step(self) -> None:
        self.writes.check()
        if self.steps and self.steps % self.every == 0:
            self._measure()
        self.steps += 1
        rates = Rates(self.optimizer)
        for (name, module, attribute), share in zip(self.places, self.shares(), strict=True):
            weight = getattr(module, attribute)
            write(weight, current(weight).mul_(1 - rates.learning_rate(weight, name) * self.decay * share))

    def shares(self) -> list[float]:
        """Factors of the decay of each weight; the middle of both ends where all tails are alike."""
        low, high = self.alphas.min(), self.alphas.max()
        place = (self.alphas - low) / (high - low) if high > low else torch.full_like(self.alphas, 0.5)
        return (self.lowest + (self.highest - self.lowest) * place).tolist()

    @torch.no_grad()
    def _measure(self) -> None:
        weights = [getattr(module, attribute) for _, module, attribute in self.places]
        self.alphas = torch.tensor([tail_index(whole(weight.detach())) for weight in weights], dtype=torch.float64)

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        spread = {"min": self.alphas.min(), "mean": self.alphas.mean(), "max": self.alphas.max()}
        return {f"alpha_decay/{name}": float(value) for name, value in spread.items()}

    def state_dict(self) -> State:
        return {"steps": self.steps, "alphas": self.alphas.clone()}

    def load_state_dict(self, state: State) -> None:
        """Refuses the state of a model with other layers."""
        if state["alphas"].shape != self.alphas.shape:
            raise refusal(f"the state of {len(self.alphas)} linear weights", len(state["alphas"]))
        self.steps, self.alphas = int(state["steps"]), state["alphas"].to(self.alphas).clone()


def tail_index(weight: Float[Tensor, "rows columns"]) -> float:
    """α = 1 + k/Σ log(λ_i/λ_k) over the larger half of the eigenvalues λ of W W^T: Hill's estimate, smaller if heavier.

    >>> round(tail_index(torch.diag(torch.tensor([1.0, 1.0, 1.0, torch.e]))), 4)  # λ: 1, 1, 1, e²
    2.0
    """
    matrix = widen(weight)
    narrow = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    values = torch.linalg.eigvalsh((narrow @ narrow.mT).double())
    tail = values[len(values) // 2 :].clamp_min(torch.finfo(values.dtype).tiny).log()
    excess = float((tail - tail[0]).sum())
    return 1 + len(tail) / max(excess, len(tail) / LIGHTEST)
