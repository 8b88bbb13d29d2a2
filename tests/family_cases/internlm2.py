"""InternLM2 by its published layout: transformers does not hold it."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from .base import TOKENS, shake, tokens

WIDTH, HEADS, KEY_HEADS, LAYERS, LONGEST = 48, 6, 2, 2, 8
GROUP, D_HEAD = HEADS // KEY_HEADS, WIDTH // HEADS


class Attention(nn.Module):
    """`wqkv` holds, for one key head after the other, the queries of its group, the key and the value."""

    def __init__(self, settings: dict[str, Any]):
        super().__init__()
        self.settings = settings
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * D_HEAD, bias=settings["bias"])
        self.wo = nn.Linear(WIDTH, WIDTH, bias=settings["bias"])

    def forward(self, x):
        groups = self.wqkv(x).unflatten(-1, (KEY_HEADS, GROUP + 2, D_HEAD))
        attention, mixed = [], []
        for group in groups.unbind(2):
            *queries, key, value = group.unbind(2)
            for query in queries:
                logits = self.turn(query) @ self.turn(key).mT / math.sqrt(D_HEAD)
                later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
                attention.append(logits.masked_fill(later, -math.inf).softmax(-1))
                mixed.append(attention[-1] @ value)
        return self.wo(torch.cat(mixed, -1)), torch.stack(attention, 1)

    def turn(self, vectors):
        """Pair (j, j + D_HEAD/2) as a complex number, times e^(i position frequency)."""
        base, scaling = self.settings["rope_theta"], self.settings["rope_scaling"]
        if scaling is not None:
            stretch = scaling["factor"] * max(TOKENS, LONGEST) / LONGEST - (scaling["factor"] - 1)
            base = base * stretch ** (D_HEAD / (D_HEAD - 2))
        frequencies = torch.tensor([base ** (-2 * j / D_HEAD) for j in range(D_HEAD // 2)])
        angles = torch.arange(TOKENS)[:, None] * frequencies
        turned = torch.complex(*vectors.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)


class Layer(nn.Module):
    def __init__(self, settings: dict[str, Any]):
        super().__init__()
        self.attention = Attention(settings)
        self.attention_norm = nn.RMSNorm(WIDTH, eps=settings["rms_norm_eps"])

    def forward(self, x):
        mixed, attention = self.attention(self.attention_norm(x))
        return x + mixed, attention


class InternLM2(nn.Module):
    def __init__(self, settings: dict[str, Any]):
        super().__init__()
        self.config = SimpleNamespace(**settings)
        self.model = nn.ModuleDict(
            dict(
                tok_embeddings=nn.Embedding(99, WIDTH),
                layers=nn.ModuleList(Layer(settings) for _ in range(LAYERS)),
                norm=nn.RMSNorm(WIDTH),
            )
        )

    def forward(self, input_ids, output_attentions):
        x, attentions = self.model["tok_embeddings"](input_ids), []
        for layer in self.model["layers"]:
            x, attention = layer(x)
            attentions.append(attention)
        return SimpleNamespace(attentions=tuple(attentions))


@dataclass(frozen=True)
class InternLM2Case:
    """The same door as a `Case`."""

    name: str
    more: dict[str, Any] = field(default_factory=dict)
    coverage: str = "COMPLETE"
    inputs = staticmethod(tokens)
    module = staticmethod(str)

    def build(self) -> nn.Module:
        settings = dict(
            model_type="internlm2",
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            num_hidden_layers=LAYERS,
            max_position_embeddings=LONGEST,
            rms_norm_eps=1e-5,
            rope_theta=300.0,
            rope_scaling=None,
            bias=False,
        )
        return shake(InternLM2(settings | self.more))

    def save(self, model: InternLM2, directory: Path) -> None:
        save_file(model.state_dict(), directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(vars(model.config)))


CASES = [
    InternLM2Case("internlm2", dict(bias=True)),
    InternLM2Case("internlm2-dynamic", dict(rope_scaling=dict(type="dynamic", factor=2.0))),
]
