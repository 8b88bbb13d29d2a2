"""Multi-head latent attention (DeepSeek-V2 and V3): keys, and as a rule queries, through a narrow normed layer."""

from dataclasses import replace

from ..config import Config
from ..rope import rope_entries, yarn_mscale
from ..schema import Family, LowRankAt, NormAt, RotaryAt
from .llama import LLAMA

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

FAMILIES = (Family("deepseek", ("deepseek_v2", "deepseek_v3"), (DIRECT, LOW_RANK)),)
