"""Stacks that mix softmax attention with state-space, convolutional or linear layers: the attention is scanned."""

from dataclasses import replace

from ..config import Config, entry
from ..schema import Family, NormAt, RotaryAt
from .llama import GRANITE, LLAMA, NEVER, RMS_EPSILON


def falcon_h1_scale(config: Config, layer: int) -> float:
    """Keys are multiplied by a number, which is the same as multiplying the logit."""
    d_head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config.get("key_multiplier", 1.0) * d_head**-0.5


def granite_turns(config: Config, layer: int) -> bool:
    return config.get("position_embedding_type") == "rope"


def nemotron_layers(config: Config, layer: int) -> int:
    """Attention, Mamba and feed-forward layers all count; the pattern has a letter for each."""
    return config.get("num_hidden_layers") or len(config["layers_block_type|layer_types|hybrid_override_pattern"])


JAMBA = replace(LLAMA, rotary=None, **NEVER)
BAMBA = replace(LLAMA, rotary=RotaryAt(fraction=0.5))
GRANITE_HYBRID = replace(GRANITE, rotary=RotaryAt(only=granite_turns))
LFM2 = replace(
    LLAMA,
    input_norm=NormAt("rms", "layers.{layer}.operator_norm", epsilon="norm_eps"),
    query_norm=NormAt("rms", "layers.{layer}.self_attn.q_layernorm", epsilon="norm_eps"),
    key_norm=NormAt("rms", "layers.{layer}.self_attn.k_layernorm", epsilon="norm_eps"),
    rotary=RotaryAt(base=entry("rope_theta|theta", 1e6)),
    **NEVER,
)
FALCON_H1 = replace(
    LLAMA,
    input_norm=NormAt(
        "rms",
        "layers.{layer}.input_layernorm",
        epsilon=entry("rms_norm_eps", 1e-5),
        times=entry("attention_in_multiplier", 1.0),
    ),
    scale=falcon_h1_scale,
)
QWEN3_NEXT = replace(
    LLAMA,
    gated=True,
    d_head=entry("head_dim", 256),
    input_norm=NormAt("rms", "layers.{layer}.input_layernorm", epsilon=RMS_EPSILON, plus_one=True),
    query_norm=NormAt("rms", "layers.{layer}.self_attn.q_norm", epsilon=RMS_EPSILON, plus_one=True),
    key_norm=NormAt("rms", "layers.{layer}.self_attn.k_norm", epsilon=RMS_EPSILON, plus_one=True),
    rotary=RotaryAt(fraction=lambda config, layer: config.values.get("partial_rotary_factor", 0.25)),
)
NEMOTRON_H = replace(
    LLAMA,
    query="layers.{layer}.mixer.q_proj",
    key="layers.{layer}.mixer.k_proj",
    layers=nemotron_layers,
    d_head=entry("head_dim|attention_head_dim", None),
    prefixes=("", "model.", "backbone."),
    input_norm=NormAt("rms", "layers.{layer}.norm", epsilon=entry("layer_norm_epsilon", 1e-5)),
    rotary=None,
)

FAMILIES = (
    Family("jamba", ("jamba",), (JAMBA,)),
    Family("bamba", ("bamba",), (BAMBA,)),
    Family("granite-hybrid", ("granitemoehybrid",), (GRANITE_HYBRID,)),
    Family("lfm2", ("lfm2",), (LFM2,)),
    Family("falcon-h1", ("falcon_h1",), (FALCON_H1,)),
    Family("qwen3-next", ("qwen3_next",), (QWEN3_NEXT,)),
    Family("nemotron-h", ("nemotron_h",), (NEMOTRON_H,)),
)
