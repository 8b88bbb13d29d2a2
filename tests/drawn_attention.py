"""Attention drawn at random: grouped keys, norms, rotary positions, windows and layouts in any combination.

Every layer keeps `kept`, its final logits from plain products, and `given`, its input: heads found must give them back.
"""

import random
from dataclasses import dataclass, fields

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, TOKENS = 60, 14


@dataclass(frozen=True)
class Draw:
    """One choice of each thing that people write in different ways."""

    heads: int
    key_heads: int
    size: int
    width: int
    keys: str
    layout: str
    bias: bool
    norm: str
    gain: str
    order: str
    epsilon: float | None
    rotary: str
    base: float
    window: str
    scale: str
    start: float
    block: str

    @classmethod
    def of(cls, seed: int) -> "Draw":
        draw = random.Random(seed)
        key_heads, groups = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
        chosen = dict(heads=key_heads * groups, key_heads=key_heads, size=draw.choice([4, 8, 16]))
        return cls(**chosen, **{name: draw.choice(CHOICES[name]) for name in CHOICES})

    def __str__(self) -> str:
        return " ".join(f"{one.name}={getattr(self, one.name)}" for one in fields(self))


CHOICES = dict(
    width=[24, 48],
    keys=["enable_gqa", "repeat_interleave", "expand", "tile"],
    layout=["separate", "fused", "kv", "by group", "values first"],
    bias=[False, True],
    norm=["none", "rms", "rms", "layer", "layer with bias", "l2", "by hand"],
    gain=["none", "ones", "random", "shared", "per head", "less one"],
    order=["before", "before", "before", "after"],
    epsilon=[None, 1e-5, 1e-6, 1e-8, 1e-3],
    rotary=["none", "half", "half", "interleaved", "part", "last"],
    base=[1e4, 500.0, 1e6],
    window=["none", "bool", "float", "causal"],
    scale=["none", "given", "in the queries"],
    start=[0.02, 0.2, 1.0],
    block=["rms", "layer"],
)


class HeadNorm(nn.Module):
    """A norm of (texts, tokens, heads, size): by torch's modules, or written out."""

    def __init__(self, draw: Draw, num_heads: int) -> None:
        super().__init__()
        self.draw, size, finest = draw, draw.size, torch.finfo(torch.float32).eps
        self.epsilon = finest if draw.epsilon is None else draw.epsilon
        plain = draw.gain == "none"
        if draw.norm == "rms" and draw.gain in ("none", "ones", "random", "shared"):
            self.module = nn.RMSNorm(size, eps=draw.epsilon, elementwise_affine=not plain)
        elif draw.norm in ("layer", "layer with bias") and draw.gain in ("none", "ones", "random", "shared"):
            bias = draw.norm == "layer with bias"
            self.module = nn.LayerNorm(size, eps=self.epsilon, elementwise_affine=not plain, bias=bias)
        else:
            shape = (num_heads, size) if draw.gain == "per head" else (size,)
            self.gain = nn.Parameter(torch.zeros(shape) if draw.gain == "less one" else torch.ones(shape))
        if draw.gain != "ones":
            for parameter in self.parameters():
                nn.init.normal_(parameter, float(parameter.detach().mean()), 0.3)

    def forward(self, x):
        if hasattr(self, "module"):
            return self.module(x)
        if self.draw.norm == "l2":
            x = F.normalize(x, dim=-1, eps=1e-12)
        else:
            x = x - x.mean(-1, keepdim=True) if self.draw.norm.startswith("layer") else x
            x = x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return x if self.draw.gain == "none" else x * (self.gain + (self.draw.gain == "less one"))


def turn(x, draw: Draw):
    """Positions 0, 1, 2, … of (texts, tokens, heads, size), by complex numbers."""
    if draw.rotary == "none":
        return x
    dims = draw.size // 2 if draw.rotary in ("part", "last") else draw.size
    start = draw.size - dims if draw.rotary == "last" else 0
    frequencies = draw.base ** -(torch.arange(0, dims, 2).double() / dims)
    turns = torch.polar(torch.ones(()).double(), torch.arange(x.shape[1]).double()[:, None, None] * frequencies)
    moving = x[..., start : start + dims].double()
    pairs = moving.unflatten(-1, (-1, 2)) if draw.rotary == "interleaved" else moving.unflatten(-1, (2, -1)).mT
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    turned = turned.flatten(-2) if draw.rotary == "interleaved" else turned.mT.flatten(-2)
    return torch.cat([x[..., :start], turned.to(x), x[..., start + dims :]], -1)


class Attention(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw, (h, k, d) = draw, (draw.heads, draw.key_heads, draw.size)
        widths = dict.fromkeys(("qkv",), (h + 2 * k) * d)
        if draw.layout in ("separate", "kv"):
            widths = dict(q=h * d, k=k * d, v=k * d) if draw.layout == "separate" else dict(q=h * d, kv=2 * k * d)
        self.maps = nn.ModuleDict({name: nn.Linear(draw.width, rows, bias=draw.bias) for name, rows in widths.items()})
        self.out = nn.Linear(h * d, draw.width, bias=draw.bias)
        if draw.norm != "none":
            self.q_norm = HeadNorm(draw, h)
            self.k_norm = self.q_norm if draw.gain == "shared" else HeadNorm(draw, k)
        self.kept = self.given = None

    def parts(self, x):
        h, k, d = self.draw.heads, self.draw.key_heads, self.draw.size
        made = {name: module(x) for name, module in self.maps.items()}
        if self.draw.layout == "separate":
            q, key, v = made.values()
        elif self.draw.layout == "kv":
            q, (key, v) = made["q"], made["kv"].chunk(2, -1)
        elif self.draw.layout == "by group":
            q, key, v = made["qkv"].unflatten(-1, (k, -1, d)).split([h // k, 1, 1], -2)
            return q.flatten(2, 3), key.squeeze(-2), v.squeeze(-2)
        else:
            order = [k * d, h * d, k * d] if self.draw.layout == "values first" else [h * d, k * d, k * d]
            q, key, v = made["qkv"].split(order, -1)
            q, key, v = (key, v, q) if self.draw.layout == "values first" else (q, key, v)
        return tuple(part.unflatten(-1, (-1, d)) for part in (q, key, v))

    def steps(self, x, norm):
        both = (norm, lambda part: turn(part, self.draw))
        for step in both if self.draw.order == "before" else reversed(both):
            x = step(x)
        return x

    def mask(self, length):
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = distance >= 0
        seen = seen & (distance < 5) if self.draw.window in ("bool", "float") else seen
        return seen, torch.zeros(length, length).masked_fill(~seen, -torch.inf)

    def forward(self, x):
        draw, (q, k, v) = self.draw, self.parts(x)
        if draw.norm != "none":
            q, k = self.steps(q, self.q_norm), self.steps(k, self.k_norm)
        else:
            q, k = turn(q, draw), turn(k, draw)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scale = {"none": draw.size**-0.5, "given": 0.3, "in the queries": draw.size**-0.5}[draw.scale]
        whole, groups = self.repeated(k), draw.heads // draw.key_heads
        seen, added = self.mask(x.shape[1])
        masked = torch.zeros(()) if draw.window == "none" else added
        self.given, self.kept = x.detach(), ((q.double() @ whole.double().mT) * scale + masked).detach()
        options = dict(none={}, causal=dict(is_causal=True), bool=dict(attn_mask=seen), float=dict(attn_mask=added))
        options = options[draw.window] | dict(none={}, given=dict(scale=scale)).get(draw.scale, dict(scale=1.0))
        q = q * draw.size**-0.5 if draw.scale == "in the queries" else q
        gqa = draw.keys == "enable_gqa" and groups > 1
        k, v = (k, v) if gqa else (whole, self.repeated(v))
        made = F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa, **options)
        return self.out(made.transpose(1, 2).flatten(2))

    def repeated(self, x):
        groups = self.draw.heads // self.draw.key_heads
        if self.draw.keys == "tile":
            return x.repeat(1, groups, 1, 1)
        if self.draw.keys == "expand":
            return x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2)
        return x.repeat_interleave(groups, 1)


class Block(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        norm = nn.RMSNorm if draw.block == "rms" else nn.LayerNorm
        self.first, self.mixer, self.second = norm(draw.width), Attention(draw), norm(draw.width)
        self.wide, self.back = nn.Linear(draw.width, 2 * draw.width), nn.Linear(2 * draw.width, draw.width)

    def forward(self, x):
        x = x + self.mixer(self.first(x))
        return x + self.back(F.gelu(self.wide(self.second(x))))


class Model(nn.Module):
    """Three layers of one draw: what the first does not show, a later one may."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, draw.width)
        self.blocks = nn.ModuleList(Block(draw) for _ in range(3))
        self.readout = nn.Linear(draw.width, VOCABULARY)
        for parameter in self.parameters():
            if parameter.dim() == 2 and not any(parameter is one for one in self._gains()):
                nn.init.normal_(parameter, std=draw.start)

    def _gains(self):
        return [p for module in self.modules() if isinstance(module, HeadNorm) for p in module.parameters()]

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.readout(x)


def drawn(seed: int) -> tuple[Model, Draw, torch.Tensor]:
    """A model, what was drawn, and tokens."""
    torch.manual_seed(seed)
    draw = Draw.of(seed)
    return Model(draw).eval(), draw, torch.randint(VOCABULARY, (2, TOKENS))
