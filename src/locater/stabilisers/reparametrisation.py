"""W ↦ γ W/σ(W), σ the largest singular value by power iteration: σReparam."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrize

from ..attention.calls import in_backward
from ..errors import refusal
from ..models.live.watch import Sample
from ..projections import whole
from .base import Stabiliser
from .live.sharding import check_not_spread

Indices = Int[Tensor, " rows"] | None


class SpectralScale(nn.Module):
    """A parametrisation. Each training pass turns every block's u, v once: two matrix-vector products.

    The gradient takes u and v as constants: that of u^T W v, exact once they have converged. `rows` of None is all.
    """

    def __init__(
        self, weight: Tensor, *, blocks: Sequence[Indices] = (None,), axis: int = 0, gain: float | None
    ) -> None:
        super().__init__()
        self.axis, self.count = axis, len(blocks)
        matrix = weight.detach().mT if axis else weight.detach()
        for number, rows in enumerate(blocks):
            self.register_buffer(f"rows{number}", rows, persistent=False)
            block = matrix if rows is None else matrix[rows.to(matrix.device)]
            self.register_buffer(f"left{number}", normalize(torch.randn_like(block[:, 0]), dim=0))
            self.register_buffer(f"right{number}", normalize(torch.randn_like(block[0]), dim=0))
            for _ in range(15):
                self._iterate(number, block)
        learned = gain is not None
        start = torch.full((len(blocks),), gain if learned else 1.0, dtype=weight.dtype, device=weight.device)
        self.gain = nn.Parameter(start) if learned else None

    @torch.no_grad()
    def _iterate(self, number: int, block: Tensor) -> None:
        left, right = self._vectors(number)
        right.copy_(normalize(block.mT @ left, dim=0))
        left.copy_(normalize(block @ right, dim=0))

    def _vectors(self, number: int) -> tuple[Tensor, Tensor]:
        return getattr(self, f"left{number}"), getattr(self, f"right{number}")

    def norms(self, weight: Float[Tensor, "rows columns"]) -> list[Float[Tensor, ""]]:
        """The largest singular value of each block, differentiable by the weight; in training one iteration nearer."""
        matrix, found = (weight.mT if self.axis else weight), []
        for number in range(self.count):
            rows = getattr(self, f"rows{number}")
            block = matrix if rows is None else matrix[rows]
            if self.training and not in_backward():  # a recomputed pass must be the one that was run
                self._iterate(number, block.detach())
            left, right = (vector.clone() for vector in self._vectors(number))
            found.append(left @ (block @ right))
        return found

    def forward(self, weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        norms = self.norms(weight)
        factors = [(1 if self.gain is None else self.gain[number]) / norm for number, norm in enumerate(norms)]
        if self.count == 1 and self.rows0 is None:
            return weight * factors[0]
        scale = torch.ones(weight.shape[self.axis], dtype=weight.dtype, device=weight.device)
        for number, factor in enumerate(factors):
            rows = getattr(self, f"rows{number}")
            scale = scale.index_put((rows,), factor.expand(len(rows)))
        return weight * (scale[None, :] if self.axis else scale[:, None])


def remove(module: nn.Module, attribute: str, *, bake: bool) -> None:
    """Take the parametrisation off: the parameter as it was given, or with `bake` what the model now computes.

    Nothing is left to do where it was taken off before.
    """
    if not parametrize.is_parametrized(module, attribute):
        return
    # torch takes the property off the class, which copies of the module share: they would be left without a weight.
    kind = type(module)
    own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    alone: Any = type(kind.__name__, kind.__bases__, own)
    module.__class__ = alone
    parametrize.remove_parametrizations(module, attribute, leave_parametrized=bake)
    # The parameter comes back behind the others, and state dicts and optimisers go by the order: weight, then bias.
    for name in [name for name in module._parameters if name != attribute]:
        module._parameters[name] = module._parameters.pop(name)


class SigmaReparam(Stabiliser):
    """Ŵ = γ W/σ(W) with a learned γ, on every linear layer (Zhai et al. 2023, arXiv 2303.06296).

    Attach before the optimiser is made: γ is a parameter. As in the paper γ starts at 1, which changes the outputs.

    A layer whose weight is an embedding too is left out. `detach()` gives the raw weights back; `detach(bake=True)`
    leaves what the model has learned to compute. A `sample` is taken as by the others, and not needed.
    """

    def __init__(self, model: nn.Module, *, gain: float = 1.0, sample: Sample | None = None) -> None:
        check_not_spread(model)
        self.places = list(linear_weights(model))
        if not self.places:
            raise refusal("a model with linear layers", type(model).__name__)
        for module, attribute in self.places:
            scale = SpectralScale(getattr(module, attribute), axis=int(type(module).__name__ == "Conv1D"), gain=gain)
            parametrize.register_parametrization(module, attribute, scale)

    def scales(self) -> list[SpectralScale]:
        return [getattr(module.parametrizations, attribute)[0] for module, attribute in self.places]  # type: ignore

    def parameters(self) -> list[nn.Parameter]:
        return [scale.gain for scale in self.scales() if scale.gain is not None]

    def metrics(self, *, heads: bool = False) -> dict[str, float]:
        gains = [float(whole(gain.detach())) for gain in self.parameters()]
        return {"sigma_reparam/mean_gain": sum(gains) / len(gains), "sigma_reparam/max_gain": max(gains)}

    def detach(self, *, bake: bool = False) -> None:
        for module, attribute in self.places:
            remove(module, attribute, bake=bake)


def linear_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every linear map's weight, shared ones once, without those that embed."""
    seen = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        attribute = "weight" if is_linear else "in_proj_weight" if isinstance(module, nn.MultiheadAttention) else None
        weight = getattr(module, attribute, None) if attribute else None
        if attribute and weight is not None and id(weight) not in seen:
            seen.add(id(weight))
            yield module, attribute
