"""State dicts of `torch.nn.TransformerEncoder`, `TransformerDecoder` and `Transformer`, under any prefix.

The config is whatever stands beside them: `nhead` must be in it, at any depth, `norm_first` and `causal` may be.
"""

from dataclasses import replace

from ..config import Config, anywhere, entry
from ..schema import Attention, Family, NormAt, NormCell

EPSILON = entry("layer_norm_eps", 1e-5)


def norm(*, first_norm: str, last_norm: str, at_start: str | None = None) -> NormCell:
    """The block's own norm with `norm_first`, else the one behind what came before (none before the first layer)."""

    def choose(config: Config, layer: int) -> NormAt:
        if config.get("norm_first", False):
            return NormAt("layer", first_norm, epsilon=EPSILON)
        return NormAt("layer", last_norm, first=at_start, epsilon=EPSILON)

    return choose


def _causal(default: bool):
    return lambda config, layer: 0 if config.get("causal|is_causal", default) else None


def rows(encoder: str, decoder: str) -> tuple[Attention, Attention, Attention]:
    """Encoder, decoder and cross-attention, with the names of the two stacks."""
    encoder_row = Attention(
        block="encoder",
        query=encoder + "layers.{layer}.self_attn.in_proj",
        key=encoder + "layers.{layer}.self_attn.in_proj",
        layers=None,
        heads=anywhere("nhead|num_heads|num_attention_heads"),
        d_model=None,
        fused="qkv",
        prefixes=None,
        input_norm=norm(first_norm=encoder + "layers.{layer}.norm1", last_norm=encoder + "layers.{previous}.norm2"),
        lookahead=_causal(False),
    )
    decoder_row = replace(
        encoder_row,
        block="decoder",
        query=decoder + "layers.{layer}.self_attn.in_proj",
        key=decoder + "layers.{layer}.self_attn.in_proj",
        input_norm=norm(first_norm=decoder + "layers.{layer}.norm1", last_norm=decoder + "layers.{previous}.norm3"),
        lookahead=_causal(True),
    )
    between = decoder + "layers.{layer}.norm1"
    cross_row = replace(
        decoder_row,
        block="cross",
        query=decoder + "layers.{layer}.multihead_attn.in_proj",
        key=decoder + "layers.{layer}.multihead_attn.in_proj",
        input_norm=norm(first_norm=decoder + "layers.{layer}.norm2", last_norm=between, at_start=between),
        key_input_norm=NormAt("layer", encoder + "norm", epsilon=EPSILON, optional=True) if encoder else None,
        lookahead=None,
    )
    return encoder_row, decoder_row, cross_row


ENCODER, DECODER, CROSS = rows("", "")
INSIDE = (
    r"(self_attn|multihead_attn)\.(in_proj_(weight|bias)|out_proj\.(weight|bias))|(linear[12]|norm[123])\.(weight|bias)"
)


def needs(config: Config) -> tuple[str, ...]:
    """Biases unless the config says that there are none: an RMS norm has none either."""
    biases = () if config.get("bias") is False else (".norm1.bias", ".self_attn.in_proj_bias")
    return ".norm1.weight", ".norm2.weight", ".linear1.weight", ".linear2.weight", *biases


# The order matters: every later signature is also an ending of the earlier ones' names.
KINDS = (
    ("torch-transformer", rows("encoder.", "decoder."), "decoder.layers.{layer}.multihead_attn.in_proj_weight"),
    ("torch-decoder", (DECODER, CROSS), "layers.{layer}.multihead_attn.in_proj_weight"),
    ("torch-encoder", (ENCODER,), "layers.{layer}.self_attn.in_proj_weight"),
)
FAMILIES = tuple(
    Family(name, (), stored, signature=signature, inside=INSIDE, needs=needs) for name, stored, signature in KINDS
)
