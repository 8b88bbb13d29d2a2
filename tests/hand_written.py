"""Attention as people write it by hand: fused, separate, transposed, grouped, normed, turned, biased, masked."""

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, SIZE, VOCABULARY = 32, 4, 8, 50
TOKENS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


def heads(x, count=HEADS):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def join(x):
    return x.transpose(1, 2).flatten(2)


def turn(x, *, base=1e4, interleaved=False, num_dims=SIZE):
    """Rotary positions from 0, written as complex numbers."""
    frequencies = base ** -(torch.arange(0, num_dims, 2).double() / num_dims)
    turns = torch.polar(torch.ones(()).double(), torch.arange(x.shape[-2]).double()[:, None] * frequencies)
    moving, still = x[..., :num_dims], x[..., num_dims:]
    first, second = (moving[..., ::2], moving[..., 1::2]) if interleaved else moving.chunk(2, -1)
    turned = torch.complex(first.double(), second.double()) * turns
    parts = (turned.real.to(x), turned.imag.to(x))
    moved = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([moved, still], -1)


class Separate(nn.Module):
    """Two projections; what happens between them and the kernel is up to the subclass."""

    key_heads, bias, options = HEADS, True, dict(is_causal=True)

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * SIZE, bias=self.bias)
        self.k_proj = nn.Linear(WIDTH, self.key_heads * SIZE, bias=self.bias)
        self.v_proj = nn.Linear(WIDTH, self.key_heads * SIZE)
        self.out = nn.Linear(WIDTH, WIDTH)

    def between(self, q, k):
        return q, k

    def forward(self, x):
        q, k = self.between(heads(self.q_proj(x)), heads(self.k_proj(x), self.key_heads))
        v = heads(self.v_proj(x), self.key_heads)
        return self.out(join(functional.scaled_dot_product_attention(q, k, v, **self.options)))


class Both(Separate):
    """Not causal."""

    options = {}


class Grouped(Separate):
    key_heads, options = 2, dict(is_causal=True, enable_gqa=True)


class Repeated(Separate):
    """One key head for all, repeated before the kernel."""

    key_heads = 1

    def forward(self, x):
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x), 1), heads(self.v_proj(x), 1)
        k, v = (part.repeat_interleave(HEADS, 1) for part in (k, v))
        return self.out(join(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))


class Rotary(Separate):
    def between(self, q, k):
        return turn(q), turn(k)


class Interleaved(Separate):
    """Half of each head turns, in neighbouring pairs."""

    def between(self, q, k):
        return (turn(part, base=500.0, interleaved=True, num_dims=4) for part in (q, k))


class Scaled(Separate):
    """The scale is in the queries already."""

    options = dict(is_causal=True, scale=1.0)

    def between(self, q, k):
        return q * SIZE**-0.5, k


class Longer(Separate):
    """Turned by a rotation that also makes longer, as YaRN's does."""

    def between(self, q, k):
        return 1.13 * turn(q), 1.13 * turn(k)


class Conv1D(nn.Module):
    """A product as transformers' GPT-2 stores it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) * WIDTH**-0.5)
        self.bias = nn.Parameter(torch.randn(3 * WIDTH))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class Normed(Separate):
    """QK-norm by a module with a gain, then rotary positions."""

    bias = False

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE, eps=1e-6), nn.RMSNorm(SIZE, eps=1e-6)

    def between(self, q, k):
        return turn(self.q_norm(q)), turn(self.k_norm(k))


class NormedByHand(Separate):
    """QK-norm written out, with a gain less one as a bare parameter."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(SIZE))

    def between(self, q, k):
        return (part * (part.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + self.gain) for part in (q, k))


class TurnedThenNormed(Separate):
    """A norm with a gain behind the rotation."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(SIZE)

    def between(self, q, k):
        return self.norm(turn(q)), self.norm(turn(k))


class Fused(nn.Module):
    """One projection; the subclass cuts it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def cut(self, qkv):
        return (heads(part) for part in qkv.chunk(3, -1))

    def forward(self, x):
        return self.out(join(functional.scaled_dot_product_attention(*self.cut(self.qkv(x)), is_causal=True)))


class Transposed(Fused):
    """Stored as (in, out), with a bias."""

    def __init__(self):
        super().__init__()
        self.qkv = Conv1D()


class PerHead(Fused):
    """q, k, v of the first head, of the second, …"""

    def cut(self, qkv):
        return qkv.unflatten(-1, (HEADS, 3, SIZE)).permute(3, 0, 2, 1, 4)


class Backwards(Fused):
    """Values, keys, queries."""

    def cut(self, qkv):
        v, k, q = super().cut(qkv)
        return q, k, v


class Bare(nn.Module):
    """Parameters without modules, stored (in, out)."""

    def __init__(self):
        super().__init__()
        self.w_query, self.w_key, self.w_value = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 5) for _ in range(3))

    def forward(self, x):
        q, k, v = (heads(x @ weight) for weight in (self.w_query, self.w_key, self.w_value))
        return join(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


class Tied(nn.Module):
    """The key is the query."""

    def __init__(self):
        super().__init__()
        self.shared, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q = heads(self.shared(x))
        return join(functional.scaled_dot_product_attention(q, q, heads(self.value(x)), is_causal=True))


class Alibi(Separate):
    """What distance adds, as a float mask."""

    def forward(self, x):
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        mask = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return self.out(join(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class Window(Separate):
    """Four tokens back, as a mask."""

    def forward(self, x):
        distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        mask = (distance >= 0) & (distance <= 3)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        return self.out(join(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class Cross(Separate):
    """Queries look at another sequence."""

    options = {}

    def forward(self, x):
        memory = x[:, :7].cos()
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(memory)), heads(self.v_proj(memory))
        return self.out(join(functional.scaled_dot_product_attention(q, k, v)))


class WrittenOut(Separate):
    """By einsum and softmax, through no kernel."""

    def forward(self, x):
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        self.weights = self.logits(*self.between(q, k)).softmax(-1)[..., : k.shape[2]]
        return self.out(join(torch.einsum("bhqk,bhkd->bhqd", self.weights, v)))

    def logits(self, q, k):
        return torch.einsum("bhqd,bhkd->bhqk", q, k) * SIZE**-0.5


class TokensFirst(WrittenOut):
    """The keys' heads behind their tokens, the products as the sum has them."""

    def logits(self, q, k):
        return torch.einsum("bkhd, bhqd -> bhqk", k.transpose(1, 2), q) * 0.3


class CausalByHand(WrittenOut):
    """Turned, masked by a large number, and the largest logit taken off."""

    def between(self, q, k):
        return turn(q), turn(k)

    def logits(self, q, k):
        logits = q @ k.transpose(2, 3) / SIZE**0.5
        logits = logits + torch.full(logits.shape[2:], -1e9).triu(1)
        return logits - logits.amax(-1, keepdim=True)


class CappedByHand(WrittenOut):
    """A soft-cap of 2 over three times the products."""

    def logits(self, q, k):
        return 2 * torch.tanh(3 * (q @ k.mT) / 2)


class SunkByHand(WrittenOut):
    """A key that is no token, with a learned logit for each head; the largest logit taken off."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def logits(self, q, k):
        logits = q @ k.mT * SIZE**-0.5
        sinks = self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], -1)
        return logits - logits.amax(-1, keepdim=True)


class ConstantSink(SunkByHand):
    """The same with numbers that are no parameter."""

    def __init__(self):
        super().__init__()
        del self.sinks
        self.sinks = torch.linspace(-1, 1, HEADS)


class FlatCap(WrittenOut):
    """A soft-cap so far away that the logits do not tell it."""

    def logits(self, q, k):
        return 1e6 * torch.tanh(q @ k.mT / 1e6)


class BiasedLogits(WrittenOut):
    """A number for every pair, which no head has."""

    def logits(self, q, k):
        return q @ k.mT + torch.linspace(-1, 1, q.shape[2] * k.shape[2]).view(q.shape[2], k.shape[2]).cos()


class Curved(Separate):
    """Queries through something that is no norm."""

    def between(self, q, k):
        return torch.tanh(q), k


class Block(nn.Module):
    def __init__(self, attention, norm):
        super().__init__()
        self.ln, self.mixer = norm(WIDTH), attention()

    def forward(self, x):
        return x + self.mixer(self.ln(x))


class Decoder(nn.Module):
    """Two blocks between an embedding and an output; no config, and no name that a table knows."""

    def __init__(self, attention, norm=nn.LayerNorm):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.stack = nn.ModuleList(Block(attention, norm) for _ in range(2))
        self.readout = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.stack:
            x = block(x)
        return self.readout(x)


def decoder(attention, norm=nn.LayerNorm):
    torch.manual_seed(0)
    model = Decoder(attention, norm)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()
