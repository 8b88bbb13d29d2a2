"""Encoders of images, alone or paired with text; and the state dicts of timm, which come with hardly a config."""

from dataclasses import replace

from ...errors import refusal
from ..config import Cell, Config, entry
from ..schema import Attention, Family, NormAt, both_biased, both_normed, causal

# Files say `attention.attention.query`, live modules of newer transformers `attention.q_proj`.
VIT = Attention(
    block="vision",
    query="encoder.layer.{layer}.attention.attention.query|layers.{layer}.attention.q_proj",
    key="encoder.layer.{layer}.attention.attention.key|layers.{layer}.attention.k_proj",
    d_head=lambda config, layer: config.get("head_dim"),
    prefixes=("", "vit.", "deit."),
    input_norm=NormAt(
        "layer",
        "encoder.layer.{layer}.layernorm_before|layers.{layer}.layernorm_before",
        epsilon=entry("layer_norm_eps", 1e-12),
    ),
    **both_biased(entry("qkv_bias", True)),
)
DINOV2 = replace(
    VIT,
    query="encoder.layer.{layer}.attention.attention.query|encoder.layer.{layer}.attention.q_proj",
    key="encoder.layer.{layer}.attention.attention.key|encoder.layer.{layer}.attention.k_proj",
    prefixes=("", "dinov2.", "dinov2_with_registers."),
    input_norm=NormAt("layer", "encoder.layer.{layer}.norm1", epsilon=entry("layer_norm_eps", 1e-6)),
)


# ------------------------------------------------------------------------------------------------- CLIP and SigLIP
def tower(tower_name: str, *, layers: int, heads: int, width: int, epsilon: float, lookahead: Cell = None) -> Attention:
    """One side of a pair. Its config leaves out what equals the default: published SigLIPs say next to nothing."""
    return Attention(
        block="vision" if tower_name == "vision" else "encoder",
        query="encoder.layers.{layer}.self_attn.q_proj",
        key="encoder.layers.{layer}.self_attn.k_proj",
        layers=entry("num_hidden_layers", layers),
        heads=entry("num_attention_heads", heads),
        d_model=entry("hidden_size", width),
        prefixes=(f"{tower_name}_model.",),
        config=f"{tower_name}_config",
        input_norm=NormAt("layer", "encoder.layers.{layer}.layer_norm1", epsilon=entry("layer_norm_eps", epsilon)),
        lookahead=lookahead,
        **both_biased(True),
    )


def as_own_model(row: Attention) -> Attention:
    """The same tower in a file of its own, whose config is the tower's."""
    return replace(row, config=None, prefixes=("", *(row.prefixes or ())))


CLIP_TEXT = tower("text", layers=12, heads=8, width=512, epsilon=1e-5, lookahead=causal)
CLIP_VISION = tower("vision", layers=12, heads=12, width=768, epsilon=1e-5)
SIGLIP_TEXT = tower("text", layers=12, heads=12, width=768, epsilon=1e-6)
SIGLIP_VISION = replace(SIGLIP_TEXT, block="vision", prefixes=("vision_model.",), config="vision_config")


def siglip_partial(config: Config) -> str | None:
    has_head = config.get("vision_config.vision_use_head|vision_use_head", True)
    return "the attention of the pooling head, which has one learned query, left out" if has_head else None


# ------------------------------------------------------------------------------------------------------------- timm
# Heads by the start of an architecture's name and its width: timm's own configs hold no more than these two.
TIMM_HEADS = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12), "large": (1024, 16), "huge": (1280, 16)}
TIMM_KINDS = ("vit", "deit", "flexivit")
TIMM_OTHER = ("rope", "dinov3", "_pe_", "eva", "diff")  # attention of another kind under the same names
TIMM_EPSILON = 1e-6


def timm_heads(config: Config, layer: int) -> int:
    architecture, width = str(config.get("architecture", "")), config.get("num_features")
    plain = architecture.startswith(TIMM_KINDS) and not any(part in architecture for part in TIMM_OTHER)
    if architecture and not plain:
        remedy = "it has positions or terms that its tensors do not show: describe it with --layout"
        raise refusal("a timm ViT with plain attention", architecture, remedy)
    stated = config.get("num_heads|model_args.num_heads")
    if stated is not None or architecture == "vit_base_patch16_gap_224":  # the one with more heads than its size has
        return 16 if stated is None else stated
    kind, _, size = architecture.partition("_")
    known_width, num_heads = TIMM_HEADS.get(size.partition("_")[0], (None, 0))
    if kind in ("vit", "deit", "deit3") and width == known_width:
        return num_heads
    return config["num_heads|model_args.num_heads"]


def timm_norm(config: Config, layer: int) -> NormAt | None:
    """Before the attention, except in the models of "res-post-norm", whose attention takes the bare residual."""
    if "_rpn_" in str(config.get("architecture", "")):
        return None
    return NormAt("layer", "blocks.{layer}.norm1", epsilon=TIMM_EPSILON, bare="rms")


TIMM = Attention(
    block="vision",
    query="blocks.{layer}.attn.qkv",
    key="blocks.{layer}.attn.qkv",
    layers=None,
    heads=timm_heads,
    d_model=None,
    fused="qkv",
    prefixes=None,
    input_norm=timm_norm,
    **both_normed(NormAt("layer", "blocks.{layer}.attn.*_norm", epsilon=TIMM_EPSILON, optional=True, bare="rms")),
)

FAMILIES = (
    Family("vit", ("vit", "deit"), (VIT,)),
    Family("dinov2", ("dinov2", "dinov2_with_registers"), (DINOV2,)),
    Family("clip", ("clip",), (CLIP_TEXT, CLIP_VISION)),
    Family("clip-text", ("clip_text_model",), (as_own_model(CLIP_TEXT),)),
    Family("clip-vision", ("clip_vision_model",), (as_own_model(CLIP_VISION),)),
    Family("siglip", ("siglip",), (SIGLIP_TEXT, SIGLIP_VISION), partial=siglip_partial),
    Family("siglip-text", ("siglip_text_model",), (as_own_model(SIGLIP_TEXT),)),
    Family("siglip-vision", ("siglip_vision_model",), (as_own_model(SIGLIP_VISION),), partial=siglip_partial),
    Family(
        "timm",
        ("timm_wrapper",),
        (TIMM,),
        signature="blocks.{layer}.attn.qkv.weight",
        inside=r"(norm[12]|attn\.([qk]_)?norm|attn\.qkv|attn\.proj)\.(weight|bias)|(ls[12]\.)?gamma(_[12])?|mlp\..+",
        needs=("patch_embed.proj.weight", "pos_embed"),  # language models written by hand have these blocks too
    ),
)
