"""The norm before the projections of a live model: found by one pass, however its output reaches them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from locater.models import read_heads
from locater.models.live import open_live

D_MODEL, HEADS, WINDOW = 32, 2, 4


class Evened(nn.Module):
    """An RMS norm under a name of its own."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x):
        return (x.float() * (x.float().square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x) * self.weight


class Squashed(nn.Module):
    """A map with a gain that is no norm."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return torch.tanh(x) * self.weight


def in_windows(x):
    padded = functional.pad(x, (0, 0, 0, -x.shape[1] % WINDOW))
    return padded.unflatten(1, (-1, WINDOW)).flatten(0, 1)


class Block(nn.Module):
    def __init__(self, kind, way):
        super().__init__()
        self.before, self.way = kind(D_MODEL), way
        self.qkv, self.out = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x):
        if self.way == "chunks":
            y = torch.cat([self.before(part) for part in x.split(3, 1)], 1)
        else:
            y = self.before(x)
        y = in_windows(y) if self.way == "windows" else y
        query, key, value = self.qkv(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.out(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + (mixed.unflatten(0, (len(x), -1)).flatten(1, 2)[:, : x.shape[1]] if self.way == "windows" else mixed)


class Model(nn.Module):
    def __init__(self, kind, way):
        super().__init__()
        self.embedding = nn.Embedding(50, D_MODEL)
        self.blocks = nn.ModuleList(Block(kind, way) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


def model_of(kind, way, dtype):
    torch.manual_seed(0)
    model = Model(kind, way)
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        model.embedding.weight.add_(1.0)  # a mean, by which the two kinds of norm differ
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["whole", "windows", "chunks"])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, Evened])
def test_the_norm_is_the_models_own(kind, way, dtype):
    model = model_of(kind, way, dtype)
    opened = open_live(model, sample=torch.randint(0, 50, (3, 10)))
    assert str(opened.coverage()) == "COMPLETE"
    x = torch.randn(2, 5, D_MODEL, dtype=dtype) + 1
    for site, block in zip(opened.sites, model.blocks, strict=True):
        norm = read_heads(site).heads[0].query.input_norm
        assert norm is not None
        expected = block.before.double()(x.double())
        torch.testing.assert_close(norm(x.double()), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-1)


@pytest.mark.parametrize("way", ["whole", "windows"])
def test_what_cannot_be_made_again_is_refused(way):
    opened = open_live(model_of(Squashed, way, torch.float32), sample=torch.randint(0, 50, (3, 10)))
    assert all("before` (Squashed)" in str(site.reason) for site in opened.sites)


def test_in_half_precision_the_nearest_kind_is_taken():
    model = model_of(nn.LayerNorm, "whole", torch.bfloat16)
    with torch.no_grad():
        model.embedding.weight.sub_(1.0)
    opened = open_live(model, sample=torch.randint(0, 50, (3, 10)))
    assert [getattr(site.row.input_norm, "kind", None) for site in opened.sites] == ["layer", "layer"]
