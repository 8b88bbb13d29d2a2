"""Choose the input of a head: attention's own, or the normalised one with the norm's gain folded into the weights."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...errors import missing, refusal
from ...models import read_heads
from ...models.live import sites
from ...projections import whole
from .pairs import Pair


@runtime_checkable
class Inputs(Protocol):
    """The gain that multiplies the columns of each pair's weights; None for none."""

    def find(self, model: nn.Module, pairs: Sequence[Pair], **options: object) -> None: ...
    def gain(self, number: int) -> Float[Tensor, " d_model"] | None: ...


class Raw:
    """The weights as they are."""

    def find(self, model: nn.Module, pairs: Sequence[Pair], **options: object) -> None:
        """Nothing to find."""

    def gain(self, number: int) -> None:
        return None


class Normalised:
    """W_Q diag(g) and W_K diag(g), g the gain of the norm before attention; g itself is not moved.

    Reads the model's tables again at each call, which costs Python time for each head: for study, not for speed.
    """

    def find(self, model: nn.Module, pairs: Sequence[Pair], **options: Any) -> None:
        self.sites = sites(model, **options)
        self.keys = [(pair.block, pair.layer) for pair in pairs]
        if all(gain is None for gain in self._gains().values()):
            raise missing("norms before attention whose gain can be folded in", "leave `inputs` out")

    def gain(self, number: int) -> Float[Tensor, " d_model"] | None:
        return self._gains().get(self.keys[number])

    @torch.no_grad()
    def _gains(self) -> dict[tuple[str, int], Tensor | None]:
        return dict(self._found())

    def _found(self) -> Iterator[tuple[tuple[str, int], Tensor | None]]:
        for layer in map(read_heads, self.sites):
            norms = [layer.heads[0].query.input_norm, layer.heads[0].key.input_norm] if layer.heads else [None, None]
            if norms[0] is not norms[1]:
                raise refusal("one input for queries and keys", f"two in {layer.block} layer {layer.number}")
            gain = norms[0].gain if norms[0] else None
            yield (layer.block, layer.number), None if gain is None else whole(gain)
