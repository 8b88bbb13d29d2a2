"""Gemma: gains stored as gain − 1, soft-capped logits, local layers between global ones."""

from dataclasses import replace

from ...errors import refusal
from ...records import Json
from ..config import Config, entry
from ..schema import Family, NormAt, RotaryAt, all_but_every, causal, window
from .llama import LLAMA, RMS_EPSILON

GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4


def query_scale(config: Config, layer: int) -> float:
    return config.get("query_pre_attn_scalar", 256) ** -0.5


def gemma2_softcap(config: Config, layer: int) -> float | None:
    """Null means none, unlike a missing entry."""
    return config.values.get("attn_logit_softcapping", 50.0)


gemma3_slides = all_but_every(6)


def gemma3_rotary(config: Config, layer: int) -> Json:
    """Local layers have a base of their own, and only global ones are stretched by `rope_scaling`."""
    kind = "sliding_attention" if gemma3_slides(config, layer) else "full_attention"
    stated = {"rope_type": "default", **config.get(f"rope_parameters.{kind}", {})}
    if kind == "sliding_attention":
        return {"rope_theta": config.get("rope_local_base_freq", LOCAL_BASE), **stated}
    return {"rope_theta": config.get("rope_theta", GLOBAL_BASE), **stated, **config.get("rope_scaling", {})}


def gemma3_lookback(config: Config, layer: int) -> int | None:
    """A model that sees both ways halves its window."""
    reach = window(gemma3_slides, default=4096)(config, layer)
    return reach if reach is None or not config.get("use_bidirectional_attention", False) else (reach + 1) // 2


def gemma3_lookahead(config: Config, layer: int) -> int | None:
    return gemma3_lookback(config, layer) if config.get("use_bidirectional_attention", False) else causal(config, layer)


def tower_lookahead(config: Config, layer: int) -> int:
    """Lookahead of the model with a vision tower, whose own code halves the window of both ways and stays causal."""
    if config.get("use_bidirectional_attention", False):
        raise refusal("a causal gemma3", "use_bidirectional_attention", "describe the model with --layout")
    return causal(config, layer)


GEMMA = replace(
    LLAMA,
    d_head=entry("head_dim", 256),
    input_norm=NormAt("rms", "layers.{layer}.input_layernorm", epsilon=RMS_EPSILON, plus_one=True),
)
GEMMA2 = replace(
    GEMMA,
    scale=query_scale,
    softcap=gemma2_softcap,
    lookback=window(all_but_every(2, stated=None), default=4096),
)
GEMMA3 = replace(
    GEMMA,
    heads=entry("num_attention_heads", 8),
    key_heads=entry("num_key_value_heads", 4),
    query_norm=NormAt("rms", "layers.{layer}.self_attn.q_norm", epsilon=RMS_EPSILON, plus_one=True),
    key_norm=NormAt("rms", "layers.{layer}.self_attn.k_norm", epsilon=RMS_EPSILON, plus_one=True),
    rotary=RotaryAt(parameters=gemma3_rotary),
    scale=query_scale,
    lookback=gemma3_lookback,
    lookahead=gemma3_lookahead,
)
GEMMA3_TOWER = replace(
    GEMMA3,
    config="text_config",
    prefixes=("language_model.model.", "model.language_model.", "language_model."),
    lookahead=tower_lookahead,
)

FAMILIES = (
    Family("gemma", ("gemma",), (GEMMA,)),
    Family("gemma2", ("gemma2",), (GEMMA2,)),
    Family("gemma3", ("gemma3_text",), (GEMMA3,)),
    Family("gemma3-vision", ("gemma3",), (GEMMA3_TOWER,), partial=lambda config: "text only, not the vision tower"),
)
