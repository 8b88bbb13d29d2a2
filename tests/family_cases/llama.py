from functools import partial

from .base import Case

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
]
