"""W ↦ γ W/σ(W) for blocks of rows of a weight, σ by power iteration: what σReparam and spectral norm share."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrize

Rows = Int[Tensor, " rows"] | None


class SpectralScale(nn.Module):
    """A parametrisation. Each training pass turns every block's u, v once: two matrix-vector products.

    The gradient takes u and v as constants: that of u^T W v, exact once they have converged. `rows` of None is all.
    """

    def __init__(self, weight: Tensor, *, blocks: Sequence[Rows] = (None,), axis: int = 0, gain: float | None) -> None:
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
        """σ of each block, differentiable by the weight."""
        matrix, found = (weight.mT if self.axis else weight), []
        for number in range(self.count):
            rows = getattr(self, f"rows{number}")
            block = matrix if rows is None else matrix[rows]
            if self.training:
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
    """Take the parametrisation off: the parameter as it was given, or with `bake` what the model now computes."""
    parametrize.remove_parametrizations(module, attribute, leave_parametrized=bake)
    # The parameter comes back behind the others, and state dicts and optimisers go by the order: weight, then bias.
    for name in [name for name in module._parameters if name != attribute]:
        module._parameters[name] = module._parameters.pop(name)
