"""Latent attention (DeepSeek-V2 and V3), and stacks that mix softmax attention with layers of other kinds.

In latent attention keys, and as a rule queries, go through a narrow normed layer. Of state-space, convolutional or
linear layers nothing is scanned.
"""

from dataclasses import replace

from ..config import Config, entry
from ..rope import rope_entries, yarn_mscale
from ..schema import Family, LowRankAt, NormAt, RotaryAt, both_normed
from .llama import GEMMA, GRANITE, INPUT_NORM, LLAMA, NEVER, QK_NORM, RMS_EPSILON

INNER_EPSILON = 1e-6  # the inner norms ignore `rms_norm_eps`


def d_head(config: Config, layer: int = 0) -> int:
    return config["qk_nope_head_dim"] + config["qk_rope_head_dim"]


def key_and_value(config: Config, layer: int) -> int:
    return config["qk_nope_head_dim"] + config["v_head_dim"]


def scale(config: Config, layer: int) -> float:
    """YaRN's correction acts on the whole logit, once for the query and once for the key."""
    scaling = Config(rope_entries(config))
    weight = scaling.get("mscale_all_dim", 0)
    stretched = scaling.get("rope_type|type", "default") != "default" and weight
    return d_head(config) ** -0.5 * (yarn_mscale(scaling["factor"], weight) ** 2 if stretched else 1)


def interleaves(config: Config, layer: int) -> bool:
    """Read the interleaving as DeepSeek-V3's code does, to which null means no; V2's always interleaves."""
    return config.get("model_type") == "deepseek_v2" or bool(config.values.get("rope_interleave", True))


# Two rows: a file has one or the other, and the row whose query is not stored finds nothing.
DIRECT = replace(
    LLAMA,
    key="layers.{layer}.self_attn.kv_a_proj_with_mqa",
    key_heads=None,
    d_head=d_head,
    key_low_rank=LowRankAt(
        down="layers.{layer}.self_attn.kv_a_proj_with_mqa",
        up="layers.{layer}.self_attn.kv_b_proj",
        norm=NormAt("rms", "layers.{layer}.self_attn.kv_a_layernorm", epsilon=INNER_EPSILON),
        rank="kv_lora_rank",
        rows="qk_nope_head_dim",
        per_head=key_and_value,
    ),
    rotary=RotaryAt(num_dims="qk_rope_head_dim", start="qk_nope_head_dim", interleaved=interleaves),
    scale=scale,
    query_bias=False,
)
LOW_RANK = replace(
    DIRECT,
    query="layers.{layer}.self_attn.q_a_proj",
    query_low_rank=LowRankAt(
        down="layers.{layer}.self_attn.q_a_proj",
        up="layers.{layer}.self_attn.q_b_proj",
        norm=NormAt("rms", "layers.{layer}.self_attn.q_a_layernorm", epsilon=INNER_EPSILON),
        rank="q_lora_rank",
        rows=d_head,
        per_head=d_head,
    ),
    query_bias=LLAMA.query_bias,
)


# Stacks that mix softmax attention with state-space, convolutional or linear layers: the attention is scanned.
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
    rotary=RotaryAt(base=entry("rope_theta|theta", 1e6)),
    **both_normed(NormAt("rms", "layers.{layer}.self_attn.*_layernorm", epsilon="norm_eps")),
    **NEVER,
)
FALCON_H1 = replace(
    LLAMA,
    input_norm=NormAt(
        "rms",
        INPUT_NORM,
        epsilon=entry("rms_norm_eps", 1e-5),
        times=entry("attention_in_multiplier", 1.0),
    ),
    scale=falcon_h1_scale,
)
QWEN3_NEXT = replace(
    LLAMA,
    gated=True,
    d_head=entry("head_dim", 256),
    input_norm=GEMMA.input_norm,
    rotary=RotaryAt(fraction=lambda config, layer: config.values.get("partial_rotary_factor", 0.25)),
    **both_normed(NormAt("rms", QK_NORM, epsilon=RMS_EPSILON, plus_one=True)),
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
    Family("deepseek", ("deepseek_v2", "deepseek_v3"), (DIRECT, LOW_RANK)),
    Family("jamba", ("jamba",), (JAMBA,)),
    Family("bamba", ("bamba",), (BAMBA,)),
    Family("granite-hybrid", ("granitemoehybrid",), (GRANITE_HYBRID,)),
    Family("lfm2", ("lfm2",), (LFM2,)),
    Family("falcon-h1", ("falcon_h1",), (FALCON_H1,)),
    Family("qwen3-next", ("qwen3_next",), (QWEN3_NEXT,)),
    Family("nemotron-h", ("nemotron_h",), (NEMOTRON_H,)),
)
