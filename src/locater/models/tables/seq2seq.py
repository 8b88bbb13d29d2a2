"""Encoder-decoders and encoders of speech: self-attention on both sides, and cross-attention."""

from dataclasses import replace

from ..config import Config, entry
from ..schema import Attention, BucketsAt, Family, NormAt, both_biased, causal, provided, renamed

PREFIXES = ("", "model.", "transformer.")

# ---------------------------------------------------------------------------------------------------------------- T5
T5_EPSILON = entry("layer_norm_epsilon", 1e-6)


def t5_buckets(stack: str, *, block: str = "0", bidirectional: bool) -> BucketsAt:
    """T5 stores one table per stack, in its first block; UMT5 one per block."""
    name = f"{stack}.block.{block}.layer.0.SelfAttention.relative_attention_bias"
    return BucketsAt(name, bidirectional, entry("relative_attention_max_distance", 128))


T5_ENCODER = Attention(
    block="encoder",
    query="encoder.block.{layer}.layer.0.SelfAttention.q",
    key="encoder.block.{layer}.layer.0.SelfAttention.k",
    layers="num_layers|num_hidden_layers",
    heads="num_heads|num_attention_heads",
    d_head="d_kv",
    prefixes=PREFIXES,
    input_norm=NormAt("rms", "encoder.block.{layer}.layer.0.layer_norm", epsilon=T5_EPSILON),
    buckets=t5_buckets("encoder", bidirectional=True),
    lookahead=provided(None, is_decoder=False),
    scale=1.0,
    **both_biased(False),
)
T5_DECODER = renamed(
    T5_ENCODER,
    "encoder",
    "decoder",
    layers="num_decoder_layers|num_layers|num_hidden_layers",
    buckets=t5_buckets("decoder", bidirectional=False),
    lookahead=causal,
)
T5_CROSS = replace(
    T5_DECODER,
    block="cross",
    query="decoder.block.{layer}.layer.1.EncDecAttention.q",
    key="decoder.block.{layer}.layer.1.EncDecAttention.k",
    input_norm=NormAt("rms", "decoder.block.{layer}.layer.1.layer_norm", epsilon=T5_EPSILON),
    key_input_norm=NormAt("rms", "encoder.final_layer_norm", epsilon=T5_EPSILON),
    buckets=None,
    lookahead=provided(None, is_encoder_decoder=True),
)
UMT5_ENCODER = replace(T5_ENCODER, buckets=t5_buckets("encoder", block="{layer}", bidirectional=True))
UMT5_DECODER = replace(T5_DECODER, buckets=t5_buckets("decoder", block="{layer}", bidirectional=False))


# -------------------------------------------------------------------------------------------- BART and its relatives
def last_encoder_layer(config: Config, layer: int) -> dict[str, int]:
    return {"last": config["encoder_layers"] - 1}


# Pre-LN: every attention has a norm of its own before it, and the encoder one at its end (mBART, Pegasus, Whisper).
PRE_ENCODER = Attention(
    block="encoder",
    query="encoder.layers.{layer}.self_attn.q_proj",
    key="encoder.layers.{layer}.self_attn.k_proj",
    layers="encoder_layers",
    heads="encoder_attention_heads",
    d_model="d_model",
    prefixes=PREFIXES,
    input_norm=NormAt("layer", "encoder.layers.{layer}.self_attn_layer_norm"),
    **both_biased(True),
)
PRE_DECODER = renamed(PRE_ENCODER, "encoder", "decoder", lookahead=causal)
PRE_CROSS = renamed(
    PRE_DECODER,
    "self_attn",
    "encoder_attn",
    block="cross",
    key_input_norm=NormAt("layer", "encoder.layer_norm", optional=True),  # a decoder may be stored alone
    lookahead=None,
)

# Whisper's keys have no bias.
WHISPER = tuple(replace(row, key_bias=False) for row in (PRE_ENCODER, PRE_DECODER, PRE_CROSS))

# Post-LN: what comes in is the output of the norm before (BART).
BART_ENCODER = replace(
    PRE_ENCODER,
    input_norm=NormAt("layer", "encoder.layers.{previous}.final_layer_norm", first="encoder.layernorm_embedding"),
)
BART_DECODER = renamed(BART_ENCODER, "encoder", "decoder", lookahead=causal)
BART_CROSS = replace(
    PRE_CROSS,
    names=last_encoder_layer,
    input_norm=NormAt("layer", "decoder.layers.{layer}.self_attn_layer_norm"),
    key_input_norm=NormAt("layer", "encoder.layers.{last}.final_layer_norm", optional=True),
)
# Marian is BART without the embedding's norm.
MARIAN_ENCODER = replace(
    BART_ENCODER, input_norm=NormAt("layer", "encoder.layers.{previous}.final_layer_norm", first=None)
)
MARIAN_DECODER = renamed(MARIAN_ENCODER, "encoder", "decoder", lookahead=causal)


# ------------------------------------------------------------------------------------------------------------ speech
def wav2vec2_norm(config: Config, layer: int) -> NormAt:
    epsilon = entry("layer_norm_eps", 1e-5)
    if config.get("do_stable_layer_norm", False):
        return NormAt("layer", "encoder.layers.{layer}.layer_norm", epsilon=epsilon)
    return NormAt("layer", "encoder.layers.{previous}.final_layer_norm", "encoder.layer_norm", epsilon)


WAV2VEC2 = Attention(
    block="encoder",
    query="encoder.layers.{layer}.attention.q_proj",
    key="encoder.layers.{layer}.attention.k_proj",
    prefixes=("", "wav2vec2.", "hubert."),
    input_norm=wav2vec2_norm,
    **both_biased(True),
)

FAMILIES = (
    Family("t5", ("t5", "mt5"), (T5_ENCODER, T5_DECODER, T5_CROSS)),
    Family("umt5", ("umt5",), (UMT5_ENCODER, UMT5_DECODER, T5_CROSS)),
    Family("bart", ("bart", "plbart"), (BART_ENCODER, BART_DECODER, BART_CROSS)),
    Family("mbart", ("mbart", "pegasus", "m2m_100", "blenderbot"), (PRE_ENCODER, PRE_DECODER, PRE_CROSS)),
    Family("marian", ("marian",), (MARIAN_ENCODER, MARIAN_DECODER, BART_CROSS)),
    Family("whisper", ("whisper",), WHISPER),
    Family("wav2vec2", ("wav2vec2", "hubert"), (WAV2VEC2,)),
)
