"""Tiny models with every layout of queries and keys, for the stabilisers' tests."""

import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from locater_lab.train.model import LanguageModel
from locater_lab.train.shape import Shape

SIZES = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, vocab_size=40)
TOKENS = torch.arange(18).reshape(2, 9) * 7 % 40


def llama(**changes) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES | dict(num_key_value_heads=2) | changes))


def gpt2(**changes) -> nn.Module:
    sizes = dict(n_layer=2, n_head=4, n_embd=32, vocab_size=40, bos_token_id=0, eos_token_id=0)
    drop = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes | drop | changes))


def neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES))


def ernie() -> nn.Module:
    """Of a type that no table names: its row is proven on first use."""
    return hf.Ernie4_5ForCausalLM(hf.Ernie4_5Config(**SIZES, num_key_value_heads=2, head_dim=8, use_bias=True))


def codegen() -> nn.Module:
    sizes = dict(n_embd=64, n_layer=1, n_head=8, rotary_dim=4, vocab_size=40, bos_token_id=0, eos_token_id=0)
    return hf.CodeGenForCausalLM(hf.CodeGenConfig(**sizes))


def albert() -> nn.Module:
    return hf.AlbertModel(hf.AlbertConfig(**SIZES, embedding_size=16, hidden_dropout_prob=0.0))


class Encoder(nn.Module):
    """torch's own encoder behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(input_ids))


class VisionAttention(nn.Module):
    """Attention of timm's shape."""

    __module__ = "timm.layers.attention"

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = 4, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm1, self.attn = nn.Embedding(40, 32), nn.LayerNorm(32), VisionAttention()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        return x + self.attn(self.norm1(x))


class OwnAttention(nn.Module):
    """Attention that no table knows."""

    def __init__(self, num_heads: int = 4, num_key_heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.find, self.offer = nn.Linear(16, 4 * num_heads, bias=False), nn.Linear(16, 4 * num_key_heads, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.find(x).unflatten(-1, (self.num_heads, 4)).transpose(1, 2)
        k = self.offer(x).unflatten(-1, (self.num_key_heads, 4)).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    @property
    def heads(self):
        return [(self.find, self.offer, self.num_heads, self.num_key_heads)]


def own() -> nn.Module:
    sizes = dict(d_model=32, num_heads=4, num_key_heads=2, num_layers=2, d_feedforward=32, context=16, vocab_size=40)
    return LanguageModel(Shape(**sizes, positions="rotary"))


MODELS = {
    "own": own,
    "gpt2": gpt2,
    "llama": llama,
    "neox": neox,
    "codegen": codegen,
    "albert": albert,
    "torch": Encoder,
    "timm": Vision,
}


def outputs(model: nn.Module) -> torch.Tensor:
    found = model(TOKENS)
    found = getattr(found, "logits", getattr(found, "last_hidden_state", found))
    assert isinstance(found, torch.Tensor)
    return found
