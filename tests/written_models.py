"""Attention as people write it: small modules that call a kernel, and beside it keep the logits that it must obey.

`kept` are the final logits, −inf where a key is masked, computed with plain products from the queries and keys that the
kernel gets: the monitor must find the statistics of their softmax.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

D, HEADS, SIZE = 32, 4, 8
WINDOW = 5


def causal(num_queries, num_keys=None):
    num_keys = num_queries if num_keys is None else num_keys
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril()


def heads(x, number=HEADS):
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


def rotate(x):
    """Rotary positions, in the interleaved form."""
    angles = torch.arange(x.shape[-2])[:, None] / 10 ** (torch.arange(x.shape[-1] // 2) / 2)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
    return torch.stack(turned, -1).flatten(-2)


def rms(x):
    return x / x.square().mean(-1, keepdim=True).sqrt()


class Written(nn.Module):
    """One attention layer: `make` gives queries, keys and values, `options` what else the kernel is told."""

    query_heads, key_heads = HEADS, HEADS

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(D, D)
        self.k_proj, self.v_proj = (nn.Linear(D, self.key_heads * SIZE) for _ in range(2))
        self.kept = None

    def make(self, x):
        key_heads = self.key_heads
        return heads(self.q_proj(x)), heads(self.k_proj(x), key_heads), heads(self.v_proj(x), key_heads)

    def options(self, length):
        return dict(is_causal=True)

    def logits(self, q, k):
        """By hand: keys repeated, scaled, masked."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~causal(q.shape[2], k.shape[2]), -torch.inf)

    def forward(self, x):
        q, k, v = self.make(x)
        self.kept = self.logits(q, k).detach()
        return F.scaled_dot_product_attention(q, k, v, **self.options(x.shape[1])).transpose(1, 2).flatten(2)


class Separate(Written):
    pass


class Fused(Written):
    """As most small GPTs are written; the kernel imported by name."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        self.kept = self.logits(q, k).detach()
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Interleaved(Fused):
    """Queries, keys and values of one head beside each other."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (HEADS, 3, SIZE)).permute(3, 0, 2, 1, 4)
        self.kept = self.logits(q, k).detach()
        return torch._C._nn.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class MultiQuery(Written):
    key_heads = 1

    def make(self, x):
        q, k, v = super().make(x)
        return q, k.expand_as(q), v.expand_as(q)


class Grouped(Written):
    key_heads = 2

    def options(self, length):
        return dict(is_causal=True, enable_gqa=True)


class Alibi(Written):
    """A float mask that forbids and adds."""

    def bias(self, length):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        bias = -(2.0 ** -torch.arange(1, HEADS + 1))[:, None, None] * distance
        return bias.masked_fill(distance < 0, -torch.inf)

    def options(self, length):
        return dict(attn_mask=self.bias(length))

    def logits(self, q, k):
        return q @ k.mT / math.sqrt(SIZE) + self.bias(q.shape[2])


class RotaryThenNorm(Written):
    def make(self, x):
        q, k, v = super().make(x)
        return rms(rotate(q)), rms(rotate(k)), v


class NormThenRotary(Written):
    def make(self, x):
        q, k, v = super().make(x)
        return rotate(rms(q)), rotate(rms(k)), v

    def options(self, length):
        return dict(is_causal=True, scale=0.5)

    def logits(self, q, k):
        return (q @ k.mT * 0.5).masked_fill(~causal(q.shape[2]), -torch.inf)


class NotCausal(Written):
    def options(self, length):
        return {}

    def logits(self, q, k):
        return q @ k.mT / math.sqrt(SIZE)


class Window(Written):
    """A sliding window as a mask of every pair."""

    def mask(self, length):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        return (distance >= 0) & (distance < WINDOW)

    def options(self, length):
        return dict(attn_mask=self.mask(length))

    def logits(self, q, k):
        return (q @ k.mT / math.sqrt(SIZE)).masked_fill(~self.mask(q.shape[2]), -torch.inf)


class Packed(Window):
    """Two documents in one row, as a float mask with the customary −10,000."""

    def mask(self, length):
        document = torch.arange(length) >= length // 2
        return causal(length) & (document[:, None] == document)

    def options(self, length):
        return dict(attn_mask=torch.zeros(length, length).masked_fill(~self.mask(length), -10_000.0))


class Cross(Written):
    """Keys from a fixed memory of another length."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(1, 7, D))

    def make(self, x):
        memory = self.memory.expand(len(x), -1, -1)
        return heads(self.q_proj(x)), heads(self.k_proj(memory)), heads(self.v_proj(memory))

    def options(self, length):
        return {}

    def logits(self, q, k):
        return q @ k.mT / math.sqrt(SIZE)


class Own(nn.Module):
    """torch's module, causal by the mask that it is called with; weights asked for or not."""

    weights = False

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.kept = None

    def forward(self, x):
        q, k, _ = F.linear(x, self.inner.in_proj_weight, self.inner.in_proj_bias).chunk(3, -1)
        self.kept = (heads(q) @ heads(k).mT / math.sqrt(SIZE)).detach()
        self.kept.masked_fill_(~causal(x.shape[1]), -torch.inf)
        return self.inner(x, x, x, attn_mask=~causal(x.shape[1]), need_weights=self.weights)[0]


class WithWeights(Own):
    weights = True


class Einsum(Written):
    """Written out: no kernel is called, and which softmax is attention's cannot be told from outside."""

    def weights(self, logits):
        return torch.softmax(logits, -1)

    def forward(self, x):
        q, k, v = self.make(x)
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(SIZE)
        logits = logits.masked_fill(~causal(x.shape[1]), -torch.inf)
        self.kept = logits.detach()
        return torch.einsum("bhqk,bhkd->bhqd", self.weights(logits), v).transpose(1, 2).flatten(2)


class WithoutSoftmax(Einsum):
    """Not even softmax is called."""

    def weights(self, logits):
        weights = logits.exp()
        return weights / weights.sum(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.attn, self.out = nn.LayerNorm(D), kind(), nn.Linear(D, D)

    def forward(self, x):
        return x + self.out(self.attn(self.norm(x)))


class Net(nn.Module):
    """Two blocks over an embedding."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, D)
        self.blocks = nn.ModuleList([Block(kind) for _ in range(2)])
        self.head = nn.Linear(D, 50)
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.mul_(2.0).add_(0.1 * torch.randn_like(parameter))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


KINDS = [
    Separate, Fused, Interleaved, MultiQuery, Grouped, Alibi, RotaryThenNorm, NormThenRotary, NotCausal, Window, Packed,
    Cross, Own,
]  # fmt: skip
