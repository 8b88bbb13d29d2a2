"""The direct path of many heads at once, against `Head.logits` of each."""

import pytest
import torch

from locater.head import Head
from locater.projections import Norm, Projection
from locater.scanning.direct import direct_logits

NUM_HEADS, D_HEAD, D_MODEL, TOKENS = 3, 4, 16, 24


def split(stored: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries and keys of all heads, as files hold them."""
    whole = torch.randn(2 * NUM_HEADS * D_HEAD, D_MODEL, dtype=dtype)
    whole = whole.T.contiguous().T if stored == "transposed" else whole
    parts = list(whole.split(D_HEAD))
    if stored == "apart":
        parts = [part.clone() for part in parts]
    queries, keys = parts[:NUM_HEADS], parts[NUM_HEADS:]
    return (queries[::-1] if stored == "backward" else queries), (keys[:1] * NUM_HEADS if stored == "one key" else keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("stored", ["rows", "transposed", "apart", "backward", "one key"])
@pytest.mark.parametrize("norm", [None, "layer", "rms"])
def test_all_heads_at_once_are_each_head(stored, dtype, norm):
    torch.manual_seed(0)
    norm = norm and Norm(norm, torch.rand(D_MODEL), torch.randn(D_MODEL))
    heads = [
        Head(0, index, *(Projection(part, torch.randn(D_HEAD), norm) for part in parts), scale=0.2 + index)
        for index, parts in enumerate(zip(*split(stored, dtype), strict=True))
    ]
    x, queries = torch.randn(TOKENS, D_MODEL), torch.arange(8, TOKENS, 3)
    inputs = x if norm is None else norm(x)
    positions = queries, torch.arange(TOKENS)
    expected = torch.stack([head.logits(inputs[queries], inputs, positions) for head in heads])
    torch.testing.assert_close(direct_logits(heads, x, queries), expected, rtol=1e-4, atol=1e-4)
