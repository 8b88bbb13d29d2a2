"""Inverses of the changes that llama.cpp's converter makes to tensors: one class for each change.

`shape` gives the shape after, `group` how many rows must be read together (none: all), `apply` the change itself.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from einops import rearrange
from torch import Tensor

from ...errors import refusal

Shape = tuple[int, ...]


@runtime_checkable
class Change(Protocol):
    """From stored tensors to the one that the model's own code would save."""

    def shape(self, *shapes: Shape) -> Shape: ...

    def group(self, shape: Shape) -> int | None: ...

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor: ...


@dataclass(frozen=True)
class Permuted:
    """Rotary rows of a head stored as pairs (0, d/2), (1, d/2+1), …: back to halves. Holds for biases, too."""

    num_heads: int

    def shape(self, *shapes: Shape) -> Shape:
        if not shapes[0] or not shapes[0][0] or shapes[0][0] % (2 * self.num_heads):
            raise refusal(f"rows for {self.num_heads} heads with rotary pairs", f"shape {list(shapes[0])}")
        return shapes[0]

    def group(self, shape: Shape) -> int | None:
        return shape[0] // self.num_heads

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        # Some heads or all of them arrive here, but each of them whole.
        return rearrange(tensors[0], "(head pair two) ... -> (head two pair) ...", two=2, pair=(group or 0) // 2)


@dataclass(frozen=True)
class Shifted:
    """A norm's gain stored as 1 + w, where the model keeps w."""

    def shape(self, *shapes: Shape) -> Shape:
        return shapes[0]

    def group(self, shape: Shape) -> int | None:
        return 1

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        return tensors[0] - 1


@dataclass(frozen=True)
class Transposed:
    """A matrix that the model keeps as (in, out)."""

    def shape(self, *shapes: Shape) -> Shape:
        if len(shapes[0]) != 2:
            raise refusal("a matrix", f"shape {list(shapes[0])}")
        return shapes[0][::-1]

    def group(self, shape: Shape) -> int | None:
        return None

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        return tensors[0].T.contiguous()


@dataclass(frozen=True)
class Regrouped:
    """Fused rows stored as all queries, all keys, all values: back to one group per key head, its queries first."""

    num_heads: int
    num_key_heads: int

    def shape(self, *shapes: Shape) -> Shape:
        rows, parts = shapes[0][0] if shapes[0] else 0, self.num_heads + 2 * self.num_key_heads
        if not rows or rows % parts or self.num_heads % self.num_key_heads:
            raise refusal(f"rows for {self.num_heads} query and {self.num_key_heads} key heads", f"{list(shapes[0])}")
        return shapes[0]

    def group(self, shape: Shape) -> int | None:
        return None

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        heads = tensors[0].unflatten(0, (self.num_heads + 2 * self.num_key_heads, -1))
        query, key, value = heads.split([self.num_heads, self.num_key_heads, self.num_key_heads])
        query = query.unflatten(0, (self.num_key_heads, -1))
        return torch.cat([query, key[:, None], value[:, None]], dim=1).flatten(0, 2)


@dataclass(frozen=True)
class Joined:
    """Latent attention's key and value maps, stored apart and the key's transposed: back to one map."""

    def shape(self, *shapes: Shape) -> Shape:
        key, value = shapes
        if len(key) != 3 or len(value) != 3 or key[0] != value[0] or key[1] != value[2]:
            raise refusal("key and value maps of the same heads and rank", f"{list(key)} and {list(value)}")
        return (key[0] * (key[2] + value[1]), key[1])

    def group(self, shape: Shape) -> int | None:
        return None

    def apply(self, tensors: list[Tensor], group: int | None) -> Tensor:
        key, value = tensors
        return torch.cat([key.transpose(1, 2), value], dim=1).flatten(0, 1)
