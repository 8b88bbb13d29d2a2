"""Decoders after GPT: fused projections, learned, additive or partly rotary positions."""

from .config import Config
from .schema import Attention, Family, NormAt


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
    input_norm=NormAt("layer", "h.{layer}.ln_1", epsilon="layer_norm_epsilon"),
    scale=gpt2_scale,
    lookahead=0,
)

FAMILIES = (Family("gpt2", ("gpt2",), (GPT2,)),)
