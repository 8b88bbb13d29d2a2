"""σReparam: Ŵ = γ W/σ(W) with a learned γ, on every linear layer (Zhai et al. 2023, arXiv 2303.06296)."""

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize

from ...errors import refusal
from ..base import Stabiliser
from .spectral_scale import SpectralScale, remove


class SigmaReparam(Stabiliser):
    """Attach before the optimiser is made: γ is a parameter. As in the paper γ starts at 1, which changes the outputs.

    A layer whose weight is an embedding too is left out. `detach()` gives the raw weights back; `detach(bake=True)`
    leaves what the model has learned to compute.
    """

    def __init__(self, model: nn.Module, *, gain: float = 1.0) -> None:
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
        gains = [float(gain.detach()) for gain in self.parameters()]
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
