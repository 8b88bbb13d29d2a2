"""Decoders with rotary positions and separate projections, after Llama."""

from .schema import Attention, Family, NormAt, RotaryAt

LLAMA = Attention(
    block="decoder",
    query="layers.{layer}.self_attn.q_proj",
    key="layers.{layer}.self_attn.k_proj",
    key_heads="num_key_value_heads|num_attention_heads",
    d_head=lambda config, layer: config.get("head_dim"),
    input_norm=NormAt("rms", "layers.{layer}.input_layernorm", epsilon="rms_norm_eps"),
    rotary=RotaryAt(),
    lookahead=0,
)

FAMILIES = (Family("llama", ("llama",), (LLAMA,)),)
