"""Learned numbers that multiply queries and keys: found after a norm, never taken for a constant or for nothing."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from locater import Live, scan
from locater.errors import Refusal
from locater.models import read_heads
from locater.models.live import open_live
from locater.stabilisers import QKClip

WIDTH, HEADS, SIZE = 32, 4, 8
TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(3))


class Scaled(nn.Module):
    """QK-norm and rotation, as modded-nanogpt has them, with a learned scale."""

    shape: tuple[int, ...] = ()

    def __init__(self, value: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.full(self.shape, value))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (self.after(turned(functional.rms_norm(self.before(part), (SIZE,)))) for part in (q, k))
        self.kept = (q @ k.mT * SIZE**-0.5).detach()
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def before(self, part: Tensor) -> Tensor:
        return part

    def after(self, part: Tensor) -> Tensor:
        return part * self.scale


def turned(part: Tensor) -> Tensor:
    angles = torch.arange(part.shape[-2])[:, None] * 100.0 ** -(torch.arange(SIZE // 2) / (SIZE // 2))
    first, second = part.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


class OneNumber(Scaled):
    shape = (1,)


class EachHead(Scaled):
    shape = (HEADS, 1, 1)


class EachHeadInBatch(Scaled):
    shape = (1, HEADS, 1, 1)


class Exponential(Scaled):
    def after(self, part: Tensor) -> Tensor:
        return part * (self.scale - 1).exp()


class Squared(Scaled):
    def after(self, part: Tensor) -> Tensor:
        return part * self.scale**2


class WithGain(Scaled):
    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.gain = nn.Parameter(torch.ones(SIZE))

    def after(self, part: Tensor) -> Tensor:
        return part * self.gain * self.scale


class BeforeNorm(Scaled):
    def before(self, part: Tensor) -> Tensor:
        return part * self.scale

    def after(self, part: Tensor) -> Tensor:
        return part


class OnValues(Scaled):
    def after(self, part: Tensor) -> Tensor:
        return part

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Grouped(Scaled):
    """Two key heads, repeated for their groups, each with a number of its own."""

    repeats = True

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.key_scale = nn.Parameter(torch.full((2, 1, 1), value))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(*x.shape[:2], -1, SIZE).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (turned(functional.rms_norm(part, (SIZE,))) for part in (q, k))
        q, k = q * self.scale, k * self.key_scale
        if self.repeats:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        self.kept = (q @ k.repeat_interleave(HEADS // k.shape[1], 1).mT * SIZE**-0.5).detach()
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeats)
        return out.transpose(1, 2).flatten(2)


class GroupedByKernel(Grouped):
    repeats = False


class Net(nn.Module):
    def __init__(self, kind: type[Scaled], value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.last = kind(value), kind(value)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.first(self.norm(x))
        self.x = self.norm(x)
        return x + self.last(self.x)


def error_after_training(model: Net) -> float:
    """Largest error of the logits by heads found now, once the learned numbers have moved."""
    found = open_live(model, sample=TOKENS).sites[1]
    with torch.no_grad():
        for attention in (model.first, model.last):
            for number in (one for name, one in attention.named_parameters() if "scale" in name):
                number += 0.3 + torch.rand(number.shape)
        model(TOKENS)
        heads = read_heads(found).heads
        assert len(heads) == HEADS
        return max(
            float((head.logits(model.x, model.x) - model.last.kept[:, head.index]).abs().max()) for head in heads
        )


@pytest.mark.parametrize("value", [1.0, 1.3])
@pytest.mark.parametrize("kind", [Scaled, OneNumber, EachHead, EachHeadInBatch, OnValues, Grouped, GroupedByKernel])
def test_heads_follow_the_number_as_it_is_learned(kind, value):
    assert error_after_training(Net(kind, value)) < 1e-4


@pytest.mark.parametrize("value", [1.0, 1.3])
@pytest.mark.parametrize("kind", [Exponential, Squared, WithGain, BeforeNorm])
def test_what_no_head_can_follow_is_refused(kind, value):
    for site in open_live(Net(kind, value), sample=TOKENS).sites:
        assert "queries that are rows of one product" in str(site.reason)


def test_a_scan_has_the_number_and_gradients_reach_it():
    rows = [scan(Live(Net(Scaled, value), sample=TOKENS)).heads[0] for value in (1.0, 2.0)]
    assert rows[1].logit_bound == pytest.approx(4 * rows[0].logit_bound, rel=1e-4)
    model = Net(EachHead, 1.0)
    head = read_heads(open_live(model, sample=TOKENS).sites[0]).heads[2]
    x = torch.randn(1, 3, WIDTH)
    head.logits(x, x).sum().backward()
    moved = model.first.scale.grad
    assert moved is not None and moved[2].any() and not moved[1].any()


def test_stabilisers_find_such_heads_and_say_what_the_norm_undoes():
    with pytest.raises(Refusal, match="first.q.weight.*QK-norm after the weights undoes their scale"):
        QKClip(Net(Scaled, 3.0), threshold=1e-3, sample=TOKENS)
