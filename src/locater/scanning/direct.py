"""The direct path: embeddings and positions straight into the heads of a layer, and the logits that they make there."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import layer_norm

from ..errors import refusal
from ..head import Head
from ..projections import Norm, widen

# The direct path looks at this many positions; what lies beyond weighs as the far ones that it sees.
SEEN = 128
# The direct path asks every so many positions: its products grow with the number of queries.
EVERY = 4
WORDS = ("embed_tokens", "word_embeddings", "wte", "embed_in", "tok_embeddings", "shared", "embedding")
POSITIONS = ("position_embeddings", "wpe", "embed_positions", "position")


class Tensors(Protocol):
    """Named tensors, stored or live."""

    @property
    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor: ...


# Asked with whether positions are needed: heads with a bias over distance have theirs already.
Direct = Callable[[bool], Float[Tensor, "tokens d_model"] | None]


def nothing(with_positions: bool) -> None:
    """No direct path: neither embeddings nor positions are at hand."""


def direct_logits(
    heads: Sequence[Head], direct: Float[Tensor, "tokens d_model"], queries: Int[Tensor, " queries"]
) -> Float[Tensor, "heads queries tokens"]:
    """`Head.logits` of what comes into a layer, through its norm: normalised once for all heads that share one.

    Heads that are no more than matrices are taken together where their weights lie evenly in memory.
    """
    norms = {id(norm): norm for norm in (head.query.input_norm for head in heads)}
    inputs = {number: _normalised(direct, norm) for number, norm in norms.items()}
    own = [inputs[id(head.query.input_norm)] for head in heads]
    if len(inputs) > 1 or not all(map(_is_bilinear, heads)):
        positions = queries, torch.arange(len(direct))
        return torch.stack([head.logits(x[queries], x, positions) for head, x in zip(heads, own, strict=True)])
    sides = [[head.query.weight for head in heads], [head.key.weight for head in heads]]
    together = all(_lie_evenly(weights, own[0].dtype) for weights in sides)
    parts = [heads] if together else [[head] for head in heads]
    return torch.cat([_bilinear(part, own[0], queries) for part in parts])


def _normalised(x: Float[Tensor, "tokens d_model"], norm: Norm | None) -> Float[Tensor, "tokens d_model"]:
    if norm is None or norm.kind != "layer":
        return x if norm is None else norm(x)
    gain, bias = (None if part is None else part.to(x) for part in (norm.gain, norm.bias))
    return layer_norm(x, x.shape[-1:], gain, bias, norm.epsilon)


def _bilinear(
    heads: Sequence[Head], x: Float[Tensor, "tokens d_model"], queries: Int[Tensor, " queries"]
) -> Float[Tensor, "heads queries tokens"]:
    """(W_K^T q)·x + b_K·q, since queries are few and keys are many; of heads whose weights lie evenly, or of one."""
    weight, key = (_as_one([getattr(head, side).weight for head in heads], x) for side in ("query", "key"))
    size = weight.shape[1]
    query = (x[queries] @ weight.flatten(0, 1).mT).unflatten(-1, (-1, size)).transpose(0, 1)
    bias, key_bias = (
        torch.stack([x.new_zeros(size) if one is None else one.to(x) for one in biases])
        for biases in zip(*((head.query.bias, head.key.bias) for head in heads), strict=True)
    )
    query = (query + bias[:, None]) * x.new_tensor([head.scale for head in heads])[:, None, None]
    reach = (query @ key).flatten(0, 1) @ x.mT
    return reach.unflatten(0, (len(heads), -1)) + query @ key_bias[..., None]


def _is_bilinear(head: Head) -> bool:
    return head.query.is_linear and head.key.is_linear and head.softcap is None and head.position_bias is None


def _lie_evenly(weights: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether they are views of one memory, each as far from the one before, in a precision that need not change."""
    first, steps = weights[0], {b.storage_offset() - a.storage_offset() for a, b in pairwise(weights)}
    kinds = {(type(one.data), one.dtype, one.shape, one.stride(), one.untyped_storage().data_ptr()) for one in weights}
    return (
        len(kinds) == 1
        and type(first.data) is Tensor
        and first.dtype == dtype
        and len(steps) < 2
        and min(steps, default=0) >= 0
    )


def _as_one(weights: Sequence[Tensor], x: Tensor) -> Float[Tensor, "heads d_head d_model"]:
    """The weights of all heads, nothing copied; of a single one, in the precision of x."""
    if len(weights) == 1:
        return weights[0].to(x)[None]
    first, second = weights[:2]
    step = second.storage_offset() - first.storage_offset()
    return first.as_strided((len(weights), *first.shape), (step, *first.stride()))


def direct_inputs(tensors: Tensors, with_positions: bool) -> Float[Tensor, "tokens d_model"] | None:
    """Embeddings of random words plus the position table; None where the words are not found.

    None, too, where positions are needed and not stored, as sinusoids often are: words alone know no distance.
    """
    words, positions = (_table(tensors, endings) for endings in (WORDS, POSITIONS))
    if words is None:
        return None
    x = _rows(tensors, words, _random_ids(tensors.shape(words)[0]))
    if positions is not None and tensors.shape(positions)[1] == x.shape[1]:
        num_rows = tensors.shape(positions)[0]
        start = num_rows % 64 if num_rows % 64 < 4 else 0  # some tables keep their first two rows for padding
        if num_rows < start + SEEN:
            return None
        x = x + widen(tensors.read(positions, (start, start + SEEN)).detach())
    elif with_positions:
        return None
    kinds = _table(tensors, ("token_type_embeddings",))
    if kinds is not None and tensors.shape(kinds)[1] == x.shape[1]:
        x = x + widen(tensors.read(kinds, (0, 1)).detach())
    if not bool(x.isfinite().all()):
        tables = " and ".join(f"`{name}`" for name in (words, positions, kinds) if name is not None)
        raise refusal(f"finite numbers in {tables}", "NaN or infinity", "the checkpoint is damaged or diverged")
    return x


def _table(tensors: Tensors, endings: Sequence[str]) -> str | None:
    ends = tuple(f".{end}.weight" for end in endings)
    found = [name for name in tensors.names if f".{name}".endswith(ends)]
    name = min(found, key=len) if found else None
    return name if name is not None and len(tensors.shape(name)) == 2 and tensors.shape(name)[0] else None


def _rows(tensors: Tensors, name: str, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens d_model"]:
    """The rows of the table among which the words lie, a block that is read once."""
    start, stop = int(ids.min()), int(ids.max()) + 1
    return widen(tensors.read(name, (start, stop)).detach()[ids - start])


def _random_ids(num_rows: int) -> Int[Tensor, " tokens"]:
    """Evenly among the first thousand or so beyond special tokens and single characters, where there are as many."""
    low, high = (1000, 3000) if num_rows > 4000 else (0, num_rows)
    return torch.randint(low, high, (SEEN,), generator=torch.Generator().manual_seed(0))
