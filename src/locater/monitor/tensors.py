"""A live model's tensors for looking at: whole where they are sharded, and never part of the graph."""

from jaxtyping import Shaped
from torch import Tensor

from ..models.live import ModuleTensors


class WholeTensors(ModuleTensors):
    """Shards are gathered when read. FSDP gathers a block's own before it runs; tensor parallelism does not.

    Gathering is a collective call: all processes come by here alike, since all run the same layers.
    """

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(super().read(name).shape)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Shaped[Tensor, "..."]:
        tensor = whole(super().read(name).detach())
        return tensor if rows is None else tensor[rows[0] : rows[1]]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore
