"""The direct path: embeddings and positions straight into the heads of a layer, and the logits that they make there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import layer_norm

from ..errors import refusal
from ..head import Block, Head
from ..models import Config, embedding_scale
from ..models.tensors import Tensors
from ..projections import Norm, is_finite, widen
from ..quantities import FIRST_QUERY
from .batch import HeadBatch

# The direct path looks at this many positions; what lies beyond weighs as the far ones that it sees.
SEEN = 128
# The direct path asks at every n-th position: its products grow with the number of queries.
EVERY = 4
QUERIES = torch.arange(FIRST_QUERY, SEEN, EVERY)
WORDS = ("embed_tokens", "word_embeddings", "wte", "embed_in", "tok_embeddings", "shared", "embedding")
POSITIONS = ("position_embeddings", "wpe", "embed_positions", "position")


@dataclass(frozen=True, eq=False)
class DirectInputs:
    """Embeddings of random words plus their positions, as they come into every layer, and normalised once for all."""

    x: Float[Tensor, "tokens d_model"]
    normalised: dict[tuple[str, float], Tensor] = field(default_factory=dict)

    def behind(self, norm: Norm | None) -> Float[Tensor, "tokens d_model"]:
        """Apply the norm without its gain and bias, in which layers differ."""
        if norm is None:
            return self.x
        kind = norm.kind, norm.epsilon
        if kind not in self.normalised:
            is_layer = norm.kind == "layer"  # of which torch has a faster form
            plain = partial(layer_norm, normalized_shape=self.x.shape[-1:], eps=norm.epsilon)
            self.normalised[kind] = (plain if is_layer else replace(norm, gain=None, bias=None))(self.x)
        return self.normalised[kind]


# Asked for a block, and whether positions are needed: heads with a bias over distance have theirs already.
Direct = Callable[[Block, bool], DirectInputs | None]


def no_direct_path(block: Block, with_positions: bool) -> None:
    """No direct path: neither embeddings nor positions are known."""


def wanted_queries(batch: HeadBatch, inputs: DirectInputs) -> Float[Tensor, "queries d_model"] | None:
    """The inputs, normalised and before gain and bias, of which `direct_logits` wants the queries; of most heads."""
    first = batch.first
    is_bilinear = batch.is_linear and first.softcap is None
    return inputs.behind(first.query.input_norm)[FIRST_QUERY::EVERY] if is_bilinear else None


def direct_logits(
    batch: HeadBatch, inputs: DirectInputs, queries: Float[Tensor, "groups heads d_head queries"] | None
) -> Float[Tensor, "heads tokens queries"]:
    """`Head.logits` of every EVERY-th query for all tokens, behind the layer's norm.

    But for a number per query, the same for all keys, which no softmax sees. `queries` are those of `wanted_queries`,
    biases included.
    """
    if queries is None:
        return torch.stack([_one_by_one(head, inputs) for head in batch.heads])
    logits = _bilinear(batch, inputs, queries * batch.first.scale)
    added = batch.added_by_distance(QUERIES - torch.arange(SEEN)[:, None])
    return logits if added is None else logits + added.to(logits)


def _one_by_one(head: Head, inputs: DirectInputs) -> Float[Tensor, "tokens queries"]:
    x = inputs.x if head.query.input_norm is None else head.query.input_norm(inputs.x)
    return head.logits(x[QUERIES], x, (QUERIES, torch.arange(SEEN))).mT


def _bilinear(
    batch: HeadBatch, inputs: DirectInputs, queries: Float[Tensor, "groups heads d_head queries"]
) -> Float[Tensor, "heads tokens queries"]:
    """x·(W_K^T q): queries are few, keys many.

    A bias of keys, the norm's own too, adds one number to all keys of a query, and is left out.
    """
    norm = batch.first.query.input_norm
    x = inputs.behind(norm)
    x = x if norm is None or norm.gain is None else x * norm.gain.to(x)
    asking = queries.to(x).transpose(1, 2).flatten(2)  # those of a group beside each other: they share a key
    weights = [key.weight for key in batch.keys]
    if (lying := _as_one(weights, x.dtype)) is not None:
        through = lying.mT @ asking
    else:
        through = torch.stack([weight.to(x).mT @ own for weight, own in zip(weights, asking, strict=True)])
    return x @ through.unflatten(-1, (batch.per_group, -1)).transpose(1, 2).flatten(0, 1)


def _as_one(weights: Sequence[Tensor], dtype: torch.dtype) -> Float[Tensor, "groups d_head d_model"] | None:
    """Weights of a precision that are views of one memory, evenly spaced, as one tensor, nothing copied; else None."""
    first, starts = weights[0], [weight.storage_offset() for weight in weights]
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    kinds = {(type(one), one.untyped_storage().data_ptr(), one.stride(), one.shape) for one in weights}
    if type(first) is not Tensor or first.dtype != dtype or len(kinds) > 1 or step < 0:
        return None
    if starts != [starts[0] + number * step for number in range(len(starts))]:
        return None
    return first.as_strided((len(weights), *first.shape), (step, *first.stride()))


def direct_of(tensors: Tensors, config: Config) -> Direct:
    """The direct path of a model, read when it is asked for; words that blocks share are read once."""
    return cache(partial(direct_inputs, tensors, config, cache(partial(_words, tensors))))


def direct_inputs(
    tensors: Tensors, config: Config, read_words: Callable[[str], Tensor], block: Block, with_positions: bool
) -> DirectInputs | None:
    """Embeddings of random words, as the model scales them, plus the position table; None where either is not known.

    Positions that are needed are often not stored, as sinusoids are not: words alone know no distance.
    """
    words, positions = (_table(tensors, endings, block) for endings in (WORDS, POSITIONS))
    if words is None or (scale := embedding_scale(config, tensors.shape(words)[1])) is None:
        return None
    x = read_words(words) if scale == 1 else scale * read_words(words)
    if positions is not None and tensors.shape(positions)[1] == x.shape[1]:
        num_rows = tensors.shape(positions)[0]
        start = num_rows % 64 if num_rows % 64 < 4 else 0  # some tables keep their first two rows for padding
        if num_rows < start + SEEN:
            return None
        x = x + widen(tensors.read(positions, (start, start + SEEN)).detach())
    elif with_positions:
        return None
    kinds = _table(tensors, ("token_type_embeddings",), block)
    if kinds is not None and tensors.shape(kinds)[1] == x.shape[1]:
        x = x + widen(tensors.read(kinds, (0, 1)).detach())
    if not is_finite(x):
        tables = " and ".join(f"`{name}`" for name in (words, positions, kinds) if name is not None)
        raise refusal(f"finite numbers in {tables}", "NaN or infinity", "the checkpoint is damaged or diverged")
    return DirectInputs(x.cpu())


def _table(tensors: Tensors, endings: Sequence[str], block: Block) -> str | None:
    """The shortest of such names; encoder and decoder may each have a table of their own."""
    ends = tuple(f".{end}.weight" for end in endings)
    found = [name for name in tensors.names if f".{name}".endswith(ends)]
    found = [name for name in found if f".{block}." in f".{name}"] or found
    name = min(found, key=len) if found else None
    return name if name is not None and len(tensors.shape(name)) == 2 and tensors.shape(name)[0] else None


def _words(tensors: Tensors, name: str) -> Float[Tensor, "tokens d_model"]:
    """The rows of the table among which the words lie, a block that is read once."""
    ids = _random_ids(tensors.shape(name)[0])
    start, stop = int(ids.min()), int(ids.max()) + 1
    return widen(tensors.read(name, (start, stop)).detach()[ids - start])


def _random_ids(num_rows: int) -> Int[Tensor, " tokens"]:
    """Beyond special tokens and single bytes, where there are as many; neighbours, so that few rows are read."""
    generator = torch.Generator().manual_seed(0)
    if num_rows > 4000:
        return 1000 + torch.randperm(SEEN, generator=generator)
    return torch.randint(0, num_rows, (SEEN,), generator=generator)
