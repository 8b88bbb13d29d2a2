"""Decoders after GPT: fused projections, learned, additive or partly rotary positions."""

from dataclasses import replace

import torch

from ..config import Config, entry
from ..schema import Attention, Family, NormAt, RotaryAt, both_biased, causal, terms_left_out

EPSILON = entry("layer_norm_epsilon", 1e-5)


def alibi_slope(index: int, num_heads: int, *, most: float = 8.0) -> float:
    """2^(−most·(i+1)/n) for the n heads of the nearest power of two below, then the odd steps of 2n in between."""
    nearest = 2 ** (num_heads.bit_length() - 1)
    further = index - nearest
    return 2 ** (-most * ((index + 1) / nearest if further < 0 else (2 * further + 1) / (2 * nearest)))


# GPT-1 and GPT-2: queries, keys and values in one transposed tensor, learned positions.


def gpt2_scale(config: Config, layer: int) -> float:
    d_head = config["n_embd|hidden_size"] // config["n_head|num_attention_heads"]
    scale = d_head**-0.5 if config.get("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if config.get("scale_attn_by_inverse_layer_idx", False) else scale


GPT2 = Attention(
    block="decoder",
    query="h.{layer}.attn.c_attn",
    key="h.{layer}.attn.c_attn",
    layers="n_layer|num_hidden_layers",
    heads="n_head|num_attention_heads",
    d_model="n_embd|hidden_size",
    fused="qkv",
    transposed=True,
    input_norm=NormAt("layer", "h.{layer}.ln_1", epsilon=EPSILON),
    scale=gpt2_scale,
    lookahead=causal,
    **both_biased(True),
)

GPT2_CROSS = replace(
    GPT2,
    block="cross",
    query="h.{layer}.crossattention.q_attn",
    key="h.{layer}.crossattention.c_attn",
    fused=None,
    values_behind=True,
    input_norm=NormAt("layer", "h.{layer}.ln_cross_attn", epsilon=EPSILON),
    lookahead=None,
)

GPT1 = replace(GPT2, scale=None, input_norm=NormAt("layer", "h.{previous}.ln_2", first=None, epsilon=EPSILON))


def nanogpt_needs(config: Config) -> tuple[str, ...]:
    """A table of positions, and biases unless the config says that there are none: an RMS norm has none either.

    Other models have the same tensors in another order, but not nanoGPT's word for the length of its texts.
    """
    config["block_size"]
    biases = () if config.get("bias") is False else (".ln_1.bias", ".attn.c_attn.bias")
    return "transformer.wpe.weight", ".ln_1.weight", ".ln_2.weight", ".mlp.c_fc.weight", ".mlp.c_proj.weight", *biases


NANOGPT = replace(GPT2, transposed=False, scale=None, query_bias=entry("bias", None))

BIGCODE = replace(
    GPT2,
    transposed=False,
    fused="grouped",
    key_heads=lambda config, layer: 1 if config.get("multi_query", True) else config["n_head|num_attention_heads"],
    scale=lambda config, layer: None if config.get("scale_attn_weights", True) else 1.0,
)

# GPT-Neo: logits are not scaled, layers alternate between all keys and a window.


def neo_lookback(config: Config, layer: int) -> int | None:
    kinds = config.get("attention_layers")
    if kinds is None:
        kinds = [kind for pattern, times in config["attention_types"] for kind in pattern * times]
    return config["window_size"] - 1 if kinds[layer] == "local" else None


NEO = Attention(
    block="decoder",
    query="h.{layer}.attn.attention.q_proj",
    key="h.{layer}.attn.attention.k_proj",
    layers="num_layers|num_hidden_layers",
    heads="num_heads|num_attention_heads",
    input_norm=NormAt("layer", "h.{layer}.ln_1", epsilon=EPSILON),
    scale=1.0,
    lookback=neo_lookback,
    lookahead=causal,
    **both_biased(False),
)

# GPT-J, CodeGen, GPT-NeoX: the first rows of a head turn.

GPTJ = replace(
    GPT2,
    query="h.{layer}.attn.q_proj",
    key="h.{layer}.attn.k_proj",
    fused=None,
    transposed=False,
    rotary=RotaryAt(base=10_000.0, num_dims="rotary_dim", interleaved=True, parameters=lambda config, layer: {}),
    scale=None,
    **both_biased(False),
)

CODEGEN = replace(GPTJ, query="h.{layer}.attn.qkv_proj", key="h.{layer}.attn.qkv_proj", fused="codegen")

NEOX = Attention(
    block="decoder",
    query="layers.{layer}.attention.query_key_value",
    key="layers.{layer}.attention.query_key_value",
    fused="grouped",
    prefixes=("", "gpt_neox."),
    input_norm=NormAt("layer", "layers.{layer}.input_layernorm", epsilon=entry("layer_norm_eps", 1e-5)),
    rotary=RotaryAt(base=entry("rotary_emb_base", 10_000.0), fraction=entry("rotary_pct", 0.25)),
    lookahead=causal,
    query_bias=entry("attention_bias", True),
)

# OPT: pre-LN, but its 350m is post-LN.


def opt_norm(config: Config, layer: int) -> NormAt:
    plain = not config.get("layer_norm_elementwise_affine", True)
    if config.get("do_layer_norm_before", True):
        return NormAt("layer", "decoder.layers.{layer}.self_attn_layer_norm", plain=plain)
    return NormAt("layer", "decoder.layers.{previous}.final_layer_norm", first=None, plain=plain)


OPT = Attention(
    block="decoder",
    query="decoder.layers.{layer}.self_attn.q_proj",
    key="decoder.layers.{layer}.self_attn.k_proj",
    prefixes=("", "model."),
    input_norm=opt_norm,
    lookahead=causal,
    **both_biased(entry("enable_bias", True)),
)

# BLOOM, Falcon, MPT: distances penalised linearly.

BLOOM = Attention(
    block="decoder",
    query="h.{layer}.self_attention.query_key_value",
    key="h.{layer}.self_attention.query_key_value",
    layers="n_layer|num_hidden_layers",
    heads="n_head|num_attention_heads",
    d_model="hidden_size|n_embed",
    fused="grouped",
    prefixes=("", "transformer."),
    input_norm=NormAt("layer", "h.{layer}.input_layernorm", epsilon=EPSILON),
    alibi=lambda config, index: alibi_slope(index, config["n_head|num_attention_heads"]),
    lookahead=causal,
    query_bias=True,
)


def falcon_is_new(config: Config) -> bool:
    """Tell whether this is the architecture of the 40B model, which first went by another model type."""
    return bool(config.get("new_decoder_architecture", config.get("model_type") == "RefinedWeb"))


def falcon_key_heads(config: Config, layer: int) -> int:
    if not falcon_is_new(config) and config.get("multi_query", True):
        return 1
    num_heads = config["num_attention_heads|n_head"]
    return config.get("num_kv_heads|n_head_kv", num_heads) if falcon_is_new(config) else num_heads


def falcon_norm(config: Config, layer: int) -> NormAt:
    two = falcon_is_new(config) and config.get("num_ln_in_parallel_attn", 2) == 2
    return NormAt("layer", "h.{layer}.ln_attn" if two else "h.{layer}.input_layernorm", epsilon=EPSILON)


def falcon_alibi(config: Config, index: int) -> float | None:
    """The slope, rounded to bfloat16 as these models do, and scaled as the logits are."""
    if not config.get("alibi", False):
        return None
    num_heads = config["num_attention_heads|n_head"]
    slope = float(torch.tensor(alibi_slope(index, num_heads)).bfloat16())
    return slope * (config["hidden_size|n_embed"] // num_heads) ** -0.5


FALCON = replace(
    BLOOM,
    key_heads=falcon_key_heads,
    input_norm=falcon_norm,
    rotary=RotaryAt(only=lambda config, layer: not config.get("alibi", False)),
    alibi=falcon_alibi,
    query_bias=entry("bias", False),
)


def mpt_key_heads(config: Config, layer: int) -> int:
    if config.get("attn_config.attn_type") == "multiquery_attention":
        return 1
    return config.get("attn_config.kv_n_heads") or config["n_heads|num_attention_heads"]


def mpt_alibi(config: Config, index: int) -> float | None:
    most = config.get("attn_config.alibi_bias_max", 8)
    wanted = config.get("attn_config.alibi", True)
    return alibi_slope(index, config["n_heads|num_attention_heads"], most=most) if wanted else None


def mpt_norm(config: Config, name: str) -> NormAt:
    kind = "rms" if "rms" in str(config.get("norm_type", "")) else "layer"
    return NormAt(kind, "blocks.{layer}." + name, epsilon=EPSILON, biased=False if kind == "rms" else mpt_bias)


def mpt_bias(config: Config, layer: int) -> bool | None:
    """MPT's own code and transformers' differ where the config is silent: then as stored."""
    without = config.get("no_bias")
    return None if without is None else not without


def mpt_partial(config: Config) -> str | None:
    """Name what MPT's own code can do and the tables cannot say."""
    terms = {
        "the clipping of queries and keys (clip_qkv)": config.get("attn_config.clip_qkv"),
        "rotary positions (attn_config.rope)": config.get("attn_config.rope"),
        "the window (sliding_window_size)": config.get("attn_config.sliding_window_size", -1) != -1,
        "the norm of each query and key (qk_gn)": config.get("attn_config.qk_gn"),
    }
    return terms_left_out(terms)


MPT = Attention(
    block="decoder",
    query="blocks.{layer}.attn.Wqkv",
    key="blocks.{layer}.attn.Wqkv",
    layers="n_layers|num_hidden_layers",
    heads="n_heads|num_attention_heads",
    key_heads=mpt_key_heads,
    d_model="d_model|hidden_size",
    fused="qkv",
    prefixes=("", "transformer."),
    input_norm=lambda config, layer: mpt_norm(config, "norm_1"),
    query_norm=lambda config, layer: mpt_norm(config, "attn.q_ln") if config.get("attn_config.qk_ln") else None,
    key_norm=lambda config, layer: mpt_norm(config, "attn.k_ln") if config.get("attn_config.qk_ln") else None,
    norm_over="projection",
    alibi=mpt_alibi,
    scale=lambda config, layer: config.get("attn_config.softmax_scale"),
    lookahead=causal,
    query_bias=mpt_bias,
)

FAMILIES = (
    Family("gpt", ("openai-gpt",), (GPT1,)),
    Family("gpt2", ("gpt2",), (GPT2, GPT2_CROSS)),
    Family(
        "nanogpt",
        (),
        (NANOGPT,),
        signature="transformer.h.{layer}.attn.c_attn.weight",
        inside=r"(ln_[12]|attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.(weight|bias)|attn\.bias",
        needs=nanogpt_needs,
    ),
    Family("gpt_bigcode", ("gpt_bigcode",), (BIGCODE,)),
    Family("gpt_neo", ("gpt_neo",), (NEO,)),
    Family("gptj", ("gptj",), (GPTJ,)),
    Family("codegen", ("codegen",), (CODEGEN,)),
    Family("gpt_neox", ("gpt_neox",), (NEOX,)),
    Family("opt", ("opt",), (OPT,)),
    Family("bloom", ("bloom",), (BLOOM,)),
    Family("falcon", ("falcon", "RefinedWeb", "RefinedWebModel"), (FALCON,)),
    Family("mpt", ("mpt",), (MPT,), partial=mpt_partial),
)
