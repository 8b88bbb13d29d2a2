"""Decoders with rotary positions and separate projections, after Llama; and Gemma, whose gains are stored less one."""

from dataclasses import replace

from ...errors import refusal
from ...records import Json
from ..config import Config, entry
from ..schema import (
    Attention,
    Family,
    NormAt,
    RotaryAt,
    ahead,
    all_but_every,
    both_biased,
    both_normed,
    causal,
    every_layer,
    layer_types_or,
    window,
)

INPUT_NORM, QK_NORM = "layers.{layer}.input_layernorm", "layers.{layer}.self_attn.*_norm"
QUERY, KEY = "layers.{layer}.self_attn.q_proj", "layers.{layer}.self_attn.k_proj"
RMS_EPSILON, LAYER_EPSILON = entry("rms_norm_eps", 1e-6), entry("layer_norm_eps", 1e-5)


def smollm3_turns(config: Config, layer: int) -> bool:
    """`no_rope_layers` holds 1 where a layer does turn."""
    turns = config.get("no_rope_layers")
    return bool(turns[layer]) if turns is not None else (layer + 1) % config.get("no_rope_layer_interval", 4) != 0


@layer_types_or
def qwen2_slides(config: Config, layer: int) -> bool:
    return layer >= config.get("max_window_layers", 28)


@layer_types_or
def qwen2_moe_slides(config: Config, layer: int) -> bool:
    return layer % 2 == 0 and layer < config.get("max_window_layers", 28)


@layer_types_or
def smollm3_slides(config: Config, layer: int) -> bool:
    return bool(config.get("use_sliding_window", False)) and not smollm3_turns(config, layer)


cohere2_slides = all_but_every(4)

STATED, NEVER, ALWAYS = both_biased(entry("attention_bias", False)), both_biased(False), both_biased(True)

LLAMA = Attention(
    block="decoder",
    query=QUERY,
    key=KEY,
    key_heads="num_key_value_heads|num_attention_heads",
    d_head=entry("head_dim", None),
    input_norm=NormAt("rms", INPUT_NORM, epsilon=RMS_EPSILON),
    rotary=RotaryAt(),
    lookahead=ahead,
    **STATED,
)
MISTRAL = replace(LLAMA, lookback=window(every_layer, default=4096), **NEVER)
MIXTRAL = replace(
    LLAMA,
    input_norm=NormAt("rms", INPUT_NORM, epsilon=entry("rms_norm_eps", 1e-5)),
    rotary=RotaryAt(base=entry("rope_theta", 1e6)),
    lookback=window(every_layer),
    **NEVER,
)
QWEN2 = replace(LLAMA, lookback=window(qwen2_slides, default=4096, switch="use_sliding_window"), **ALWAYS)
QWEN2_MOE = replace(
    LLAMA,
    lookback=window(qwen2_moe_slides, default=4096, switch="use_sliding_window"),
    **both_biased(entry("qkv_bias", True)),
)
QWEN3 = replace(
    QWEN2,
    d_head=entry("head_dim", 128),
    **both_normed(NormAt("rms", QK_NORM, epsilon=RMS_EPSILON)),
    **STATED,
)
QWEN3_MOE = replace(QWEN3, d_head=LLAMA.d_head, lookback=window(every_layer, default=4096, switch="use_sliding_window"))
OLMO2 = replace(
    LLAMA,
    input_norm=None,
    norm_over="projection",
    **both_normed(NormAt("rms", QK_NORM, epsilon=entry("rms_norm_eps", 1e-5))),
)
SMOLLM3 = replace(
    LLAMA,
    rotary=RotaryAt(base=entry("rope_theta", 2e6), only=smollm3_turns),
    lookback=window(smollm3_slides),
)
STABLELM = replace(
    LLAMA,
    d_head=None,
    input_norm=NormAt("layer", INPUT_NORM, epsilon=LAYER_EPSILON),
    rotary=RotaryAt(fraction=entry("partial_rotary_factor", 0.25)),
    **both_normed(
        NormAt("layer", "layers.{layer}.self_attn.*_layernorm.norms.{head}", epsilon=LAYER_EPSILON, biased=False),
        switch="qk_layernorm",
    ),
    **both_biased(entry("use_qkv_bias", False)),
)
STABLELM_EPOCH = replace(
    STABLELM,
    input_norm=NormAt("layer", INPUT_NORM, epsilon=entry("norm_eps", 1e-5)),
    query_norm=None,
    key_norm=None,
    rotary=RotaryAt(fraction=entry("rope_pct", 0.25)),
)
PHI = replace(
    STABLELM,
    d_head=LLAMA.d_head,
    rotary=RotaryAt(fraction=entry("partial_rotary_factor", 0.5)),
    **both_normed(
        NormAt("layer", "layers.{layer}.self_attn.*_layernorm", epsilon=LAYER_EPSILON), switch="qk_layernorm"
    ),
    **ALWAYS,
)
PHI3 = replace(
    LLAMA,
    query="layers.{layer}.self_attn.qkv_proj",
    key="layers.{layer}.self_attn.qkv_proj",
    fused="qkv",
    input_norm=NormAt("rms", INPUT_NORM, epsilon=entry("rms_norm_eps", 1e-5)),
    rotary=RotaryAt(fraction=entry("partial_rotary_factor", 1.0)),
    lookback=window(every_layer),
    query_bias=False,
)
COHERE_NORM = NormAt("layer", INPUT_NORM, epsilon=LAYER_EPSILON, biased=False)
COHERE = replace(
    LLAMA,
    input_norm=COHERE_NORM,
    rotary=RotaryAt(base=entry("rope_theta", 5e5), interleaved=True),
    **both_normed(replace(COHERE_NORM, name=QK_NORM), switch="use_qk_norm"),
)
COHERE2 = replace(
    COHERE,
    d_head=None,
    query_norm=None,
    key_norm=None,
    rotary=RotaryAt(interleaved=True, only=cohere2_slides),
    lookback=window(cohere2_slides, default=4096),
)
GRANITE = replace(LLAMA, scale=entry("attention_multiplier", 1.0))
STARCODER2 = replace(
    LLAMA,
    input_norm=NormAt("layer", INPUT_NORM, epsilon=entry("norm_epsilon", 1e-5)),
    lookback=window(every_layer),
    **both_biased(entry("use_bias", True)),
)
INTERNLM2 = replace(
    LLAMA,
    query="layers.{layer}.attention.wqkv",
    key="layers.{layer}.attention.wqkv",
    fused="grouped",
    input_norm=NormAt("rms", "layers.{layer}.attention_norm", epsilon=RMS_EPSILON),
    query_bias=entry("bias", True),
)

# A layer norm without numbers of its own; queries and keys may be clipped, which no row says.
OLMO = replace(LLAMA, input_norm=NormAt("layer", INPUT_NORM, plain=True))
NEMOTRON = replace(
    LLAMA,
    input_norm=NormAt("layer", INPUT_NORM, epsilon=entry("norm_eps", 1e-5), plus_one=True),
    rotary=RotaryAt(fraction=entry("partial_rotary_factor", 0.5)),
)
DOTS1 = replace(QWEN3, d_head=LLAMA.d_head, lookback=window(layer_types_or(lambda config, layer: False), default=4096))


def olmo_partial(config: Config) -> str | None:
    return "the clipping of queries and keys (clip_qkv) left out" if config.get("clip_qkv") else None


# Gemma: gains stored as gain − 1, soft-capped logits, local layers between global ones.
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
    input_norm=NormAt("rms", INPUT_NORM, epsilon=RMS_EPSILON, plus_one=True),
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
    rotary=RotaryAt(parameters=gemma3_rotary),
    scale=query_scale,
    lookback=gemma3_lookback,
    lookahead=gemma3_lookahead,
    **both_normed(NormAt("rms", QK_NORM, epsilon=RMS_EPSILON, plus_one=True)),
)
GEMMA3_TOWER = replace(
    GEMMA3,
    config="text_config",
    prefixes=("language_model.model.", "model.language_model.", "language_model."),
    lookahead=tower_lookahead,
)

FAMILIES = (
    Family("llama", ("llama",), (LLAMA,)),
    Family("mistral", ("mistral",), (MISTRAL,)),
    Family("mixtral", ("mixtral",), (MIXTRAL,)),
    Family("qwen2", ("qwen2",), (QWEN2,)),
    Family("qwen2-moe", ("qwen2_moe",), (QWEN2_MOE,)),
    Family("qwen3", ("qwen3",), (QWEN3,)),
    Family("qwen3-moe", ("qwen3_moe",), (QWEN3_MOE,)),
    Family("olmo", ("olmo",), (OLMO,), partial=olmo_partial),
    Family("nemotron", ("nemotron",), (NEMOTRON,)),
    Family("dots1", ("dots1",), (DOTS1,)),
    Family("olmo2", ("olmo2",), (OLMO2,)),
    Family("smollm3", ("smollm3",), (SMOLLM3,)),
    Family("stablelm", ("stablelm",), (STABLELM,)),
    Family("stablelm-epoch", ("stablelm_epoch",), (STABLELM_EPOCH,)),
    Family("phi", ("phi",), (PHI,)),
    Family("phi3", ("phi3",), (PHI3,)),
    Family("cohere", ("cohere",), (COHERE,)),
    Family("cohere2", ("cohere2",), (COHERE2,)),
    Family("granite", ("granite", "granitemoe"), (GRANITE,)),
    Family("starcoder2", ("starcoder2",), (STARCODER2,)),
    Family("internlm2", ("internlm2",), (INTERNLM2,)),
    Family("gemma", ("gemma",), (GEMMA,)),
    Family("gemma2", ("gemma2",), (GEMMA2,)),
    Family("gemma3", ("gemma3_text",), (GEMMA3,)),
    Family("gemma3-vision", ("gemma3",), (GEMMA3_TOWER,), partial=lambda config: "text only, not the vision tower"),
)
