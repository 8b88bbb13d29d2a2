"""A small transformer language model, readable top to bottom.

Attention goes through `scaled_dot_product_attention`, which is the slot that stabilisers and monitors attach to.
"""

import math
from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from locater.errors import refusal

from .shape import Shape

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu-tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


# Tokens whose logits are held at once: few passes over the gradient of the weights, and buffers that caches still help.
TOKENS_AT_ONCE = 512


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass over pieces of the tokens: p − target is the gradient, so no logits are kept.

    Products are taken in `dtype`, exponentials and sums in at least float32.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        inputs, words = x.to(dtype), weight.to(dtype)
        by_x, by_weight = torch.empty_like(x), torch.zeros_like(weight)
        total = x.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
        for start in range(0, len(x), TOKENS_AT_ONCE):
            piece = slice(start, start + TOKENS_AT_ONCE)
            target = targets[piece, None]
            logits = _wide(inputs[piece] @ words.T)
            largest = logits.amax(1, keepdim=True)
            total += (largest - logits.gather(1, target)).sum()
            share = logits.sub_(largest).exp_()
            sums = share.sum(1, keepdim=True)
            total += sums.log().sum()
            error = share.div_(sums).scatter_add_(1, target, share.new_full(target.shape, -1.0)).to(dtype)
            by_x[piece] = error @ words
            by_weight += error.T @ inputs[piece]
        ctx.save_for_backward(by_x, by_weight)
        return total / len(x)

    @staticmethod
    @once_differentiable  # a second derivative would be silently wrong
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        by_x, by_weight = ctx.saved_tensors
        factor = grad_outputs[0] / len(by_x)
        return by_x * factor, by_weight * factor, None, None


def linear_cross_entropy(
    x: Float[Tensor, "tokens d_model"], weight: Float[Tensor, "words d_model"], targets: Int[Tensor, " tokens"]
) -> Float[Tensor, ""]:
    """−log softmax(W x)_target, the mean over tokens, without holding all logits: O(TOKENS_AT_ONCE · words) memory.

    Compiled code holds them all at once, since it fuses what is done to them.
    """
    if torch.compiler.is_compiling():
        return functional.cross_entropy(_wide(functional.linear(x, weight)), targets)
    if torch.is_grad_enabled():
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        with torch.autocast(device, enabled=False):
            return _LinearCrossEntropy.apply(x, weight, targets, dtype)
    pieces = zip(x.split(TOKENS_AT_ONCE), targets.split(TOKENS_AT_ONCE), strict=True)
    losses = [
        functional.cross_entropy(_wide(functional.linear(one, weight)), of, reduction="sum") for one, of in pieces
    ]
    return torch.stack(losses).sum() / len(x)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def make_norm(shape: Shape) -> nn.Module:
    if shape.norm == "rms":
        return nn.RMSNorm(shape.d_model, eps=shape.epsilon)
    return nn.LayerNorm(shape.d_model, eps=shape.epsilon, bias=shape.bias)


def angles(length: int, num_pairs: int, *, base: float, spacing: int) -> Float[Tensor, "length num_pairs"]:
    """position · base^(−j/spacing), in float64 so that long texts keep their phase."""
    frequencies = base ** (-torch.arange(num_pairs, dtype=torch.float64) / spacing)
    return torch.arange(length, dtype=torch.float64)[:, None] * frequencies


def sinusoids(length: int, d_model: int) -> Float[Tensor, "length d_model"]:
    """Sines, then cosines, of geometric frequencies from 1 to 1/10,000, as in fairseq."""
    turned = angles(length, d_model // 2, base=10_000.0, spacing=max(1, d_model // 2 - 1))
    return torch.cat([turned.sin(), turned.cos()], 1).float()


def rotate(
    x: Float[Tensor, "batch heads tokens d_head"],
    cosine: Float[Tensor, "tokens pairs"],
    sine: Float[Tensor, "tokens pairs"],
) -> Float[Tensor, "batch heads tokens d_head"]:
    """Turn the pairs (j, j + d_head/2) of each token by its angles."""
    first, second = x.chunk(2, -1)
    cosine, sine = cosine.to(x), sine.to(x)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class SelfAttention(nn.Module):
    """Causal self-attention; grouped keys serve num_heads / key_heads query heads each."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.d_head, self.dropout = shape.d_head, shape.attention_drop
        self.grouped = shape.key_heads != shape.num_heads
        keys = shape.key_heads * shape.d_head
        self.query = nn.Linear(shape.d_model, shape.d_model, bias=shape.bias)
        self.key = nn.Linear(shape.d_model, keys, bias=shape.bias)
        self.value = nn.Linear(shape.d_model, keys, bias=shape.bias)
        self.output = nn.Linear(shape.d_model, shape.d_model, bias=shape.bias)
        self.turns = shape.positions == "rotary"
        if self.turns:
            turned = angles(shape.context, shape.d_head // 2, base=shape.rotary_base, spacing=shape.d_head // 2)
            self.register_buffer("cosine", turned.cos().float(), persistent=False)
            self.register_buffer("sine", turned.sin().float(), persistent=False)

    def forward(self, x: Float[Tensor, "batch tokens d_model"]) -> Float[Tensor, "batch tokens d_model"]:
        projected = self.query(x), self.key(x), self.value(x)
        query, key, value = (rearrange(one, "b t (h d) -> b h t d", d=self.d_head) for one in projected)
        if self.turns:
            cosine, sine = self.cosine[: x.shape[1]], self.sine[: x.shape[1]]
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout * self.training, is_causal=True, enable_gqa=self.grouped
        )
        return self.output(rearrange(mixed, "b h t d -> b t (h d)"))


class FeedForward(nn.Module):
    """W₂ f(W₁ x + b₁) + b₂, token by token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inner = nn.Linear(shape.d_model, shape.d_feedforward, bias=shape.bias)
        self.outer = nn.Linear(shape.d_feedforward, shape.d_model, bias=shape.bias)
        self.activation = ACTIVATIONS[shape.activation]

    def forward(self, x: Float[Tensor, "batch tokens d_model"]) -> Float[Tensor, "batch tokens d_model"]:
        return self.outer(self.activation(self.inner(x)))


class Layer(nn.Module):
    """x + f(norm x) for attention, then feed-forward; or norm(x + f(x)), the older post-LN."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_first = shape.norm_first
        self.attention, self.attention_norm = SelfAttention(shape), make_norm(shape)
        self.feedforward, self.feedforward_norm = FeedForward(shape), make_norm(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Float[Tensor, "batch tokens d_model"]) -> Float[Tensor, "batch tokens d_model"]:
        if self.norm_first:
            x = x + self.dropout(self.attention(self.attention_norm(x)))
            return x + self.dropout(self.feedforward(self.feedforward_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feedforward_norm(x + self.dropout(self.feedforward(x)))


class LanguageModel(nn.Module):
    """Tokens to the logits of each next token, or with `targets` to the mean cross entropy."""

    predicts_next_token = True  # so its loss on a text can be shown
    sinusoids: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.vocab_size < 1:
            raise refusal("a vocabulary", shape.vocab_size, "set vocab_size")
        self.config = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.d_model)
        if shape.positions == "learned":
            self.position = nn.Embedding(shape.context, shape.d_model)
        elif shape.positions == "sinusoidal":
            self.register_buffer("sinusoids", sinusoids(shape.context, shape.d_model), persistent=False)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = make_norm(shape) if shape.norm_first else nn.Identity()
        self.output = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        self.apply(self._initialise)
        self._scale_attention()
        if shape.tied:
            self.output.weight = self.embedding.weight

    def _initialise(self, module: nn.Module) -> None:
        """Biases zero; embeddings of unit size once scaled and balanced projections (fairseq), else 0.02 (GPT-2)."""
        if isinstance(module, nn.Linear | nn.Embedding):
            if not self.config.scaled_embedding:
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
            else:
                nn.init.xavier_uniform_(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @torch.no_grad()
    def _scale_attention(self) -> None:
        """Multiply queries, keys and values by `qkv_gain`: Xavier's bound scales with its gain."""
        for module in self.modules() if self.config.qkv_gain != 1 else ():
            if isinstance(module, SelfAttention):
                for projection in (module.query, module.key, module.value):
                    projection.weight *= self.config.qkv_gain

    def embed(self, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens d_model"]:
        x = self.embedding(tokens)
        if self.config.scaled_embedding:
            x = x * math.sqrt(self.config.d_model)
        if self.config.positions == "learned":
            x = x + self.position.weight[: tokens.shape[1]]
        elif self.config.positions == "sinusoidal":
            x = x + self.sinusoids[: tokens.shape[1]]
        return self.dropout(x)

    def hidden(self, tokens: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens d_model"]:
        """Compute the input of the output layer."""
        if tokens.shape[1] > self.config.context:
            raise refusal(f"at most {self.config.context} tokens", tokens.shape[1], "cut the text or raise context")
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(
        self, tokens: Int[Tensor, "batch tokens"], targets: Int[Tensor, "batch tokens"] | None = None
    ) -> Float[Tensor, "..."]:
        x = self.hidden(tokens)
        if targets is None:
            return self.output(x)
        return linear_cross_entropy(x.flatten(0, 1), self.output.weight, targets.flatten())
