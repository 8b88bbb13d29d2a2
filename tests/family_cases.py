"""One row per family: the smallest Hugging Face model that exercises everything the family's table row says."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

TOKENS = 12


def tokens(config: Any) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 90, (2, TOKENS))}


@dataclass(frozen=True)
class Case:
    """`config` and `model` are names in transformers; `settings` the config's arguments."""

    name: str
    config: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Any], dict[str, Any]] = tokens
    coverage: str = "COMPLETE"

    def build(self) -> torch.nn.Module:
        """A random model in which every bias and gain matters and attention is far from uniform."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        config._attn_implementation = "eager"
        model = getattr(transformers, self.model)._from_config(config, attn_implementation="eager").eval().float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return model


GQA = dict(
    vocab_size=99,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
llama = partial(Case, config="LlamaConfig", model="LlamaForCausalLM")

CASES = [
    llama("llama", settings=GQA | dict(attention_bias=True)),
    llama("llama-head-dim", settings=GQA | dict(head_dim=16)),
    llama(
        "llama-3",
        settings=GQA
        | dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            )
        ),
    ),
    Case(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        dict(vocab_size=99, n_embd=48, n_layer=2, n_head=4, n_positions=64, scale_attn_by_inverse_layer_idx=True),
    ),
]
