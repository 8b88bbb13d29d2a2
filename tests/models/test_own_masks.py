"""Own models whose masks are no window are never COMPLETE: heads say how far back and ahead they look, no more."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from locater import Live, scan

D, HEADS, TOKENS = 16, 2, 16
QUERY, J = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
CAUSAL = J <= QUERY
RANDOM = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.5
WINDOWS = {
    "causal": CAUSAL,
    "all": CAUSAL | True,
    "window": CAUSAL & (QUERY - J < 4),
    "behind": J >= QUERY,
    "band": (QUERY - J).abs() < 3,
    "left padding": CAUSAL & (J > 2),
    "right padding": CAUSAL & (J < 12),
}
OTHERS = {
    "prefix": CAUSAL | (J < 4),
    "sink and window": CAUSAL & ((QUERY - J < 4) | (J < 2)),
    "dilated": CAUSAL & ((QUERY - J) % 2 == 0),
    "random": CAUSAL & (RANDOM | (QUERY == J)),
    "without itself": QUERY != J,
    "blocks": QUERY // 4 == J // 4,
    "a window of each head": CAUSAL & (torch.tensor([2, 99])[:, None, None] > QUERY - J),
    "one key less": CAUSAL & ~((QUERY == 9) & (J == 3)),
}


class Net(nn.Module):
    def __init__(self, mask, size=TOKENS):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.mask, self.size = nn.Linear(D, 3 * D), mask, size

    def forward(self, x):
        shape = (-1, self.size, HEADS, D // HEADS)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return scaled_dot_product_attention(q, k, v, self.mask).transpose(1, 2).reshape(x.shape)


def coverage(model):
    return str(scan(Live(model, sample=torch.randn(2, TOKENS, D)), length=TOKENS).coverage)


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_padding_are_complete(name):
    assert coverage(Net(WINDOWS[name])) == "COMPLETE"


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_partial(name):
    line = coverage(Net(OTHERS[name]))
    assert line.startswith("PARTIAL") and "masked otherwise than by a window" in line


def test_texts_that_are_cut_behind_the_projection_are_partial():
    line = coverage(Net(None, size=4))
    assert line.startswith("PARTIAL") and "cut into other texts" in line
