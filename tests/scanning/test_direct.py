"""The direct path of many heads at once, against `Head.logits` of each."""

import pytest
import torch

from locater.head import Head
from locater.positions import Alibi
from locater.projections import Norm, Projection
from locater.scanning.batch import HeadBatch, batches
from locater.scanning.direct import QUERIES, SEEN, DirectInputs, direct_logits, wanted_queries
from locater.scanning.products import multiply

pytestmark = pytest.mark.quick

NUM_HEADS, D_HEAD, D_MODEL = 3, 4, 16


def split(stored: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries and keys of all heads, as files hold them."""
    whole = torch.randn(2 * NUM_HEADS * D_HEAD, D_MODEL, dtype=dtype)
    whole = whole.T.contiguous().T if stored == "transposed" else whole
    parts = list(whole.split(D_HEAD))
    if stored == "apart":
        parts = [part.clone() for part in parts]
    queries, keys = parts[:NUM_HEADS], parts[NUM_HEADS:]
    return (queries[::-1] if stored == "backward" else queries), (keys[:1] * NUM_HEADS if stored == "one key" else keys)


def found(heads: list[Head], x: torch.Tensor) -> torch.Tensor:
    """The queries by their folded weights, as a scan makes them."""
    return torch.cat([found_together(batch, DirectInputs(x)) for batch in batches(heads)])


def found_together(batch: HeadBatch, inputs: DirectInputs) -> torch.Tensor:
    wanted = wanted_queries(batch, inputs)
    if wanted is None:
        return direct_logits(batch, inputs, None)
    queries = torch.stack([head.folded().query(wanted).mT for head in batch.heads])
    return direct_logits(batch, inputs, queries.unflatten(0, (batch.num_groups, -1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stored", ["rows", "transposed", "apart", "backward", "one key"])
@pytest.mark.parametrize("norm", [None, "layer", "rms"])
@pytest.mark.parametrize(
    "changed", [dict(), dict(position_bias=Alibi(0.2)), dict(softcap=1.0)], ids=["", "alibi", "cap"]
)
def test_all_heads_at_once_are_each_head(stored, dtype, norm, changed):
    torch.manual_seed(0)
    norm = norm and Norm(norm, torch.rand(D_MODEL), torch.randn(D_MODEL))
    heads = [
        Head(0, index, *(Projection(part, torch.randn(D_HEAD), norm) for part in parts), scale=0.2, **changed)
        for index, parts in enumerate(zip(*split(stored, dtype), strict=True))
    ]
    x = torch.randn(SEEN, D_MODEL)
    inputs = x if norm is None else norm(x)
    positions = QUERIES, torch.arange(SEEN)
    expected = torch.stack([head.logits(inputs[QUERIES], inputs, positions).mT for head in heads]).softmax(-2)
    torch.testing.assert_close(found(heads, x).softmax(-2), expected, rtol=1e-4, atol=1e-6)


def test_heads_of_different_scales_and_biases_are_each_head():
    torch.manual_seed(0)
    whole, x = torch.randn(2 * NUM_HEADS * D_HEAD, D_MODEL), torch.randn(SEEN, D_MODEL)
    parts = whole.split(D_HEAD)
    heads = [
        Head(0, n, Projection(parts[n], None if n else torch.randn(D_HEAD)), Projection(parts[n + 3]), scale=0.2 + n)
        for n in range(NUM_HEADS)
    ]
    positions = QUERIES, torch.arange(SEEN)
    expected = torch.stack([head.logits(x[QUERIES], x, positions).mT for head in heads]).softmax(-2)
    torch.testing.assert_close(found(heads, x).softmax(-2), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heads_per_key", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_queries_on_the_way_are_those_of_folded_weights(heads_per_key, transposed):
    """And the Gram products are what they are without."""
    torch.manual_seed(0)
    norm = Norm("layer", torch.rand(D_MODEL), torch.randn(D_MODEL))

    def weight() -> torch.Tensor:
        return torch.randn(D_MODEL, D_HEAD).T if transposed else torch.randn(D_HEAD, D_MODEL)

    keys = [Projection(weight(), input_norm=norm) for _ in range(2)]
    heads = [Head(0, n, Projection(weight(), input_norm=norm), key, 0.2) for key in keys for n in range(heads_per_key)]
    (batch,) = batches(heads)
    x = torch.randn(5, D_MODEL)
    products = multiply(batch, x, raw=False)
    for own, other in zip(products.grams, multiply(batch, raw=False).grams, strict=True):
        torch.testing.assert_close(own, other)
    sides = [head.folded().query for head in heads]
    expected = torch.stack([side.weight @ x.mT + side.bias[:, None] for side in sides])  # the norm's bias is one
    torch.testing.assert_close(products.queries.flatten(0, 1), expected)
