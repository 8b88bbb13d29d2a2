"""Checkpoints as frameworks write them: torch's transformers, Meta's, TorchTitan's, Megatron-Core's, OpenAI's Whisper.

What stands beside them says little: whatever no default of the framework's own code settles is asked for.
"""

from collections.abc import Callable
from dataclasses import replace

from ...records import JsonMapping
from ..config import Config, anywhere, entry
from ..schema import (
    Attention,
    Family,
    NormAt,
    NormCell,
    RotaryAt,
    both_biased,
    every_layer,
    renamed,
    terms_left_out,
    window,
)

# ------------------------------------- torch's TransformerEncoder, TransformerDecoder and Transformer, under any prefix
# Their config is whatever stands beside them: `nhead` must be in it, at any depth, `norm_first` and `causal` may be.
EPSILON = entry("layer_norm_eps", 1e-5)


def torch_norm(first_norm: str, last_norm: str, *, at_start: str | None = None) -> NormCell:
    """The block's own norm with `norm_first`, else the one behind what came before (none before the first layer)."""

    def choose(config: Config, layer: int) -> NormAt:
        if config.get("norm_first", False):
            return NormAt("layer", first_norm, epsilon=EPSILON)
        return NormAt("layer", last_norm, first=at_start, epsilon=EPSILON)

    return choose


def _torch_causal(default: bool):
    return lambda config, layer: 0 if config.get("causal|is_causal", default) else None


def torch_rows(encoder: str, decoder: str) -> tuple[Attention, Attention, Attention]:
    """Encoder, decoder and cross-attention, with the names of the two stacks."""
    at, before, own, last = (f"{s}layers.{{{n}}}." for s in (encoder, decoder) for n in ("layer", "previous"))
    encoder_row = Attention(
        block="encoder",
        query=f"{at}self_attn.in_proj",
        key=f"{at}self_attn.in_proj",
        layers=None,
        heads=anywhere("nhead|num_heads|num_attention_heads"),
        d_model=None,
        fused="qkv",
        prefixes=None,
        input_norm=torch_norm(f"{at}norm1", f"{before}norm2"),
        lookahead=_torch_causal(False),
    )
    decoder_row = replace(
        encoder_row,
        block="decoder",
        query=f"{own}self_attn.in_proj",
        key=f"{own}self_attn.in_proj",
        input_norm=torch_norm(f"{own}norm1", f"{last}norm3"),
        lookahead=_torch_causal(True),
    )
    cross_row = replace(
        decoder_row,
        block="cross",
        query=f"{own}multihead_attn.in_proj",
        key=f"{own}multihead_attn.in_proj",
        input_norm=torch_norm(f"{own}norm2", f"{own}norm1", at_start=f"{own}norm1"),
        key_input_norm=NormAt("layer", encoder + "norm", epsilon=EPSILON, optional=True) if encoder else None,
        lookahead=None,
    )
    return encoder_row, decoder_row, cross_row


WHOLE, (ENCODER, DECODER, CROSS) = torch_rows("encoder.", "decoder."), torch_rows("", "")
TORCH_INSIDE = (
    r"(self_attn|multihead_attn)\.(in_proj_(weight|bias)|out_proj\.(weight|bias))|(linear[12]|norm[123])\.(weight|bias)"
)


def torch_needs(config: Config) -> tuple[str, ...]:
    """Biases unless the config says that there are none: an RMS norm has none either."""
    biases = () if config.get("bias") is False else (".norm1.bias", ".self_attn.in_proj_bias")
    return ".norm1.weight", ".norm2.weight", ".linear1.weight", ".linear2.weight", *biases


# The order matters: every later signature is also an ending of the earlier ones' names.
TORCH = tuple(
    Family(name, (), stored, signature=signature, inside=TORCH_INSIDE, needs=torch_needs)
    for name, stored, signature in (
        ("torch-transformer", WHOLE, "decoder.layers.{layer}.multihead_attn.in_proj_weight"),
        ("torch-decoder", (DECODER, CROSS), "layers.{layer}.multihead_attn.in_proj_weight"),
        ("torch-encoder", (ENCODER,), "layers.{layer}.self_attn.in_proj_weight"),
    )
)


# -------------------------------------------------------------------------------------------- Meta, TorchTitan, Mistral
def meta_rope(config: Config, layer: int) -> JsonMapping:
    """Llama 3.1's frequencies where `use_scaled_rope` is set; their factor differs between models."""
    base = {"rope_theta": config["rope_theta"]}
    if not config.get("use_scaled_rope", False):
        return base
    scaling = {"rope_type": "llama3", "factor": config["rope_scaling_factor"], "low_freq_factor": 1.0}
    high, original = config.get("rope_high_freq_factor", 4.0), config.get("rope_original_context", 8192)
    return base | scaling | {"high_freq_factor": high, "original_max_position_embeddings": original}


META = Attention(
    block="decoder",
    query="layers.{layer}.attention.wq",
    key="layers.{layer}.attention.wk",
    layers=entry("n_layers", None),
    heads="n_heads",
    key_heads="n_kv_heads|n_heads",
    d_model=None,
    d_head=entry("head_dim", None),
    prefixes=None,
    input_norm=NormAt("rms", "layers.{layer}.attention_norm", epsilon=entry("norm_eps", 1e-5)),
    rotary=RotaryAt(interleaved=True, parameters=meta_rope),
    lookback=window(every_layer),
    lookahead=0,
)


# ------------------------------------------------------------------------------------------------------- Megatron-Core
def megatron_turns(config: Config, layer: int) -> bool:
    """Its own default is learned positions, its users' are rotary: one of the two entries must say."""
    if (kind := config.get("position_embedding_type")) is not None:
        return kind == "rope"
    return config["position_embedding_type|rotary_base|rope_theta"] is not None


def megatron_rope(config: Config, layer: int) -> JsonMapping:
    base = {"rope_theta": config["rotary_base|rope_theta"]}
    if not config.get("use_rope_scaling|rope_scaling", False):
        return base
    scaling = {"rope_type": "llama3", "factor": config["rope_scaling_factor"], "original_max_position_embeddings": 8192}
    return base | scaling | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def megatron_norm(name: str, *, optional: bool = False):
    """LayerNorms have a bias, RMSNorms none; the gain may be stored as gain − 1."""

    def norm(config: Config, layer: int) -> NormAt:
        less_one = bool(config.get("layernorm_zero_centered_gamma|apply_layernorm_1p", False))
        epsilon = entry("layernorm_epsilon|norm_epsilon", 1e-5)
        return NormAt("layer", name, epsilon=epsilon, plus_one=less_one, optional=optional, bare="rms")

    return norm


def megatron_partial(config: Config) -> str | None:
    terms = {
        "the window (window_size)": config.get("window_size"),
        "the sink of the softmax (softmax_type)": config.get("softmax_type", "vanilla") != "vanilla",
        "layers without rotary positions (no_rope_freq)": config.get("no_rope_freq"),
    }
    return terms_left_out(terms)


def megatron_needs(config: Config) -> tuple[str, ...]:
    """A table of positions where the config names one."""
    return ("position_embeddings.weight",) if config.get("position_embedding_type") == "learned_absolute" else ()


MEGATRON = Attention(
    block="decoder",
    query="decoder.layers.{layer}.self_attention.linear_qkv",
    key="decoder.layers.{layer}.self_attention.linear_qkv",
    layers=entry("num_layers|num_hidden_layers", None),
    heads="num_attention_heads",
    key_heads="num_query_groups|num_key_value_heads|num_attention_heads",
    d_model=None,
    d_head=entry("kv_channels|head_dim", None),
    fused="grouped",
    prefixes=None,
    input_norm=megatron_norm(
        "decoder.layers.{layer}.self_attention.linear_qkv.layer_norm|decoder.layers.{layer}.input_layernorm"
    ),
    query_norm=megatron_norm("decoder.layers.{layer}.self_attention.q_layernorm", optional=True),
    key_norm=megatron_norm("decoder.layers.{layer}.self_attention.k_layernorm", optional=True),
    rotary=RotaryAt(
        fraction=entry("rotary_percent", 1.0),
        interleaved=entry("rotary_interleaved", False),
        only=megatron_turns,
        parameters=megatron_rope,
    ),
    scale=entry("softmax_scale", None),
    lookahead=0,
)

# ---------------------------------------------------------------------------------------------------- OpenAI's Whisper
WHISPER_ENCODER = Attention(
    block="encoder",
    query="encoder.blocks.{layer}.attn.query",
    key="encoder.blocks.{layer}.attn.key",
    layers="n_audio_layer",
    heads="n_audio_head",
    d_model="n_audio_state",
    prefixes=("",),
    input_norm=NormAt("layer", "encoder.blocks.{layer}.attn_ln"),
)
WHISPER_DECODER = renamed(renamed(WHISPER_ENCODER, "audio", "text"), "encoder", "decoder", lookahead=0)
WHISPER_CROSS = renamed(
    WHISPER_DECODER,
    ".attn",
    ".cross_attn",
    block="cross",
    key_input_norm=NormAt("layer", "encoder.ln_post"),
    lookahead=None,
)


# The models that `locater train` makes.
BIAS = entry("bias", None)


def input_norm(config: Config, layer: int) -> NormAt:
    """A layer's own first norm, or in a post-LN model the last of the layer before; the walk's model has none."""
    kind = "rms" if config.get("norm") == "rms" else "layer"
    norm = NormAt(
        kind, "layers.{layer}.attention_norm", epsilon=entry("epsilon", 1e-5), biased=None if kind == "rms" else BIAS
    )
    if config.get("norm_first", False):
        return norm
    return replace(norm, name="layers.{previous}.feedforward_norm", first=None)


def qk_norm(side: str) -> Callable[[Config, int], NormAt | None]:
    """Build the norm of a model trained with `stabiliser=qk-norm`; not with rotary positions, which it stands after."""
    norm = NormAt("rms", f"layers.{{layer}}.attention.qk_norm.{side}", epsilon=1e-6)

    def chosen(config: Config, layer: int) -> NormAt | None:
        is_before = config.get("positions") != "rotary"
        return norm if is_before and config.get("stabiliser", "") == "qk-norm" else None

    return chosen


def softcap(config: Config, layer: int) -> float | None:
    """Return the cap of a model trained with `stabiliser=soft-cap`."""
    name, _, value = config.get("stabiliser_options", "").partition("=")
    return float(value) if name == "cap" else None


OWN = Attention(
    block="decoder",
    query="layers.{layer}.attention.query",
    key="layers.{layer}.attention.key",
    layers="num_layers",
    heads="num_heads",
    key_heads=lambda config, layer: config.get("num_key_heads") or config["num_heads"],
    d_model="d_model",
    prefixes=("", "model."),
    input_norm=input_norm,
    query_norm=qk_norm("query"),
    key_norm=qk_norm("key"),
    softcap=softcap,
    rotary=RotaryAt(base="rotary_base", only=lambda config, layer: config.get("positions") == "rotary"),
    lookahead=0,
    **both_biased(BIAS),
)

FAMILIES = (
    *TORCH,
    Family(
        "meta-llama",
        (),
        (META,),
        signature="layers.{layer}.attention.wq.weight",
        inside=r"attention\.w[qkvo]\.weight|(attention_norm|ffn_norm)\.weight|(feed_forward|moe|block_sparse_moe)\..+",
        needs=(".attention_norm.weight", ".ffn_norm.weight"),
    ),
    Family(
        "megatron-core",
        (),
        (MEGATRON,),
        partial=megatron_partial,
        signature="decoder.layers.{layer}.self_attention.linear_qkv.weight",
        inside=r"self_attention\.(linear_qkv|linear_proj|[qk]_layernorm)\.(layer_norm_)?(weight|bias|_extra_state.*)"
        r"|(input_layernorm|pre_mlp_layernorm|mlp)\..+|self_attention\.core_attention\._extra_state.*",
        needs=megatron_needs,
    ),
    Family(
        "openai-whisper",
        (),
        (WHISPER_ENCODER, WHISPER_DECODER, WHISPER_CROSS),
        signature="decoder.blocks.{layer}.cross_attn.query.weight",
        inside=r"(cross_)?attn\.(query\.(weight|bias)|key\.weight|value\.(weight|bias)|out\.(weight|bias))"
        r"|((cross_)?attn_ln|mlp_ln|mlp\.\d)\.(weight|bias)",
        needs=("encoder.positional_embedding", "decoder.positional_embedding", ".attn.query.bias", ".attn_ln.bias"),
    ),
    Family("locater", ("locater",), (OWN,), initial=("qkv_gain",)),
)
