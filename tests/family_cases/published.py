"""Models that transformers does not hold, written down by their definition: nanoGPT, and MPT with all its options."""

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

WIDTH, HEADS, LAYERS = 48, 6, 2


class NanoAttention(nn.Module):
    def __init__(self, *, bias: bool):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        attention = causal(query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
        return self.c_proj((attention @ value).transpose(1, 2).flatten(-2)), attention


class FoundryAttention(nn.Module):
    """MPT's attention as its authors publish it: QK-norm over all heads, fewer key heads, any ALiBi maximum."""

    def __init__(self, settings: dict[str, Any]):
        super().__init__()
        self.settings = settings
        keys = 1 if settings.get("attn_type") == "multiquery_attention" else settings.get("kv_n_heads", HEADS)
        self.sizes = [WIDTH, keys * WIDTH // HEADS, keys * WIDTH // HEADS]
        self.Wqkv = nn.Linear(WIDTH, sum(self.sizes))
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        if settings["qk_ln"]:
            self.q_ln, self.k_ln = nn.LayerNorm(self.sizes[0]), nn.LayerNorm(self.sizes[1])

    def forward(self, x):
        query, key, value = self.Wqkv(x).split(self.sizes, -1)
        if self.settings["qk_ln"]:
            query, key = self.q_ln(query), self.k_ln(key)
        query, key, value = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (query, key, value))
        key, value = (part.repeat_interleave(HEADS // part.shape[1], 1) for part in (key, value))
        logits = query @ key.mT / math.sqrt(query.shape[-1])
        if self.settings["alibi"]:
            logits = logits + self.slopes()[:, None, None] * torch.arange(1 - TOKENS, 1)
        attention = causal(logits).softmax(-1)
        return self.out_proj((attention @ value).transpose(1, 2).flatten(-2)), attention

    def slopes(self):
        power = 2 ** math.ceil(math.log2(HEADS))
        slopes = 2.0 ** -(torch.arange(1, power + 1) * self.settings.get("alibi_bias_max", 8) / power)
        return slopes if power == HEADS else torch.cat([slopes[1::2], slopes[::2]])[:HEADS]


def causal(logits):
    return logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -math.inf)


class Decoder(nn.Module):
    """As much of a pre-LN decoder as attention needs; the names of its parts differ between the two."""

    def __init__(self, names: tuple[str, str], attentions: list[nn.Module], *, norm_bias: bool):
        super().__init__()
        self.names = names
        blocks, norm = names
        parts = [{norm: nn.LayerNorm(WIDTH, bias=norm_bias), "attn": attention} for attention in attentions]
        stack = nn.ModuleList(nn.ModuleDict(part) for part in parts)
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(99, WIDTH), blocks: stack})
        self.config = SimpleNamespace()

    def forward(self, input_ids, output_attentions):
        x, seen = self.transformer["wte"](input_ids), []
        for block in self.transformer[self.names[0]]:
            added, attention = block["attn"](block[self.names[1]](x))
            x = x + added
            seen.append(attention)
        return SimpleNamespace(attentions=seen)


@dataclass(frozen=True)
class NanoCase:
    """A nanoGPT run's `ckpt.pt`, of a compiled model."""

    name: str
    bias: bool
    coverage: str = "by its tensor names, as nanogpt, not run"
    inputs = staticmethod(tokens)
    module = staticmethod(lambda name: name)

    def build(self) -> nn.Module:
        model = Decoder(("h", "ln_1"), [NanoAttention(bias=self.bias) for _ in range(LAYERS)], norm_bias=self.bias)
        return shake(model)

    def rest(self) -> dict[str, torch.Tensor]:
        """What no head needs, but nanoGPT has."""
        sizes = {"ln_2": (WIDTH,), "mlp.c_fc": (4 * WIDTH, WIDTH), "mlp.c_proj": (WIDTH, 4 * WIDTH)}
        sizes = {f"transformer.h.{layer}.{name}": size for layer in range(LAYERS) for name, size in sizes.items()}
        tensors = {f"{name}.weight": torch.ones(size) for name, size in sizes.items()}
        tensors |= {f"{name}.bias": torch.ones(size[0]) for name, size in sizes.items() if self.bias}
        return tensors | {"transformer.wpe.weight": torch.ones(64, WIDTH)}

    def save(self, model: nn.Module, directory: Path) -> None:
        arguments = dict(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, block_size=64, bias=self.bias, vocab_size=99)
        state = {f"_orig_mod.{name}": tensor for name, tensor in (model.state_dict() | self.rest()).items()}
        torch.save({"model": state, "model_args": arguments, "iter_num": 7}, directory / "ckpt.pt")


@dataclass(frozen=True)
class FoundryCase:
    """MPT with settings that transformers' own port leaves unread."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    coverage: str = "COMPLETE"
    inputs = staticmethod(tokens)
    module = staticmethod(lambda name: name)

    def build(self) -> nn.Module:
        model = Decoder(("blocks", "norm_1"), [FoundryAttention(self.settings) for _ in range(LAYERS)], norm_bias=True)
        return shake(model)

    def save(self, model: nn.Module, directory: Path) -> None:
        config = dict(model_type="mpt", d_model=WIDTH, n_heads=HEADS, n_layers=LAYERS, attn_config=self.settings)
        (directory / "config.json").write_text(json.dumps(config))
        save_file(model.state_dict(), directory / "model.safetensors")
