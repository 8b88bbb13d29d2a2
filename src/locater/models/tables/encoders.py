"""Encoders of text: BERT and its heirs, mostly post-LN, so a layer's input norm is the last one of the layer before."""

from collections.abc import Mapping
from dataclasses import replace

from ..config import Config, entry
from ..schema import Attention, BucketsAt, Family, NormAt, RotaryAt, both_biased, causal

EPSILON = entry("layer_norm_eps", 1e-12)


def relative_terms(config: Config) -> str | None:
    kind = config.get("position_embedding_type", "absolute")
    return f"the position terms of {kind} left out" if str(kind).startswith("relative") else None


BERT = Attention(
    block="encoder",
    only=lambda config, layer: not config.get("is_decoder", False),
    query="encoder.layer.{layer}.attention.self.query",
    key="encoder.layer.{layer}.attention.self.key",
    prefixes=("", "bert.", "roberta.", "electra."),
    input_norm=NormAt(
        "layer", "encoder.layer.{previous}.output.LayerNorm", first="embeddings.LayerNorm", epsilon=EPSILON
    ),
    **both_biased(True),
)

BERT_DECODER = replace(BERT, block="decoder", only=entry("is_decoder", False), lookahead=causal)

BERT_CROSS = replace(
    BERT,
    block="cross",
    only=entry("is_decoder", False),
    query="encoder.layer.{layer}.crossattention.self.query",
    key="encoder.layer.{layer}.crossattention.self.key",
    input_norm=NormAt("layer", "encoder.layer.{layer}.attention.output.LayerNorm", epsilon=EPSILON),
)

BERT_ROWS = (BERT, BERT_DECODER, BERT_CROSS)

# ELECTRA and ALBERT may project the embedding after its norm; then the first layer's input has none.


def electra_norm(config: Config, layer: int) -> NormAt:
    width = config["hidden_size"]
    projected = config.get("embedding_size", 128) != width
    first = None if projected else "embeddings.LayerNorm"
    return NormAt("layer", "encoder.layer.{previous}.output.LayerNorm", first=first, epsilon=EPSILON)


ELECTRA = replace(BERT, input_norm=electra_norm)
ELECTRA_DECODER = replace(BERT_DECODER, input_norm=electra_norm)


def albert_names(config: Config, layer: int) -> dict[str, int]:
    """Map this layer, and the one before, to the stored layers that serve as them."""
    inner, groups = config.get("inner_group_num", 1), config.get("num_hidden_groups", 1)

    def place(at: int) -> tuple[int, int]:
        turn, within = divmod(at, inner)
        return int(turn / (config["num_hidden_layers"] / groups)), within

    (group, within), (group_before, before) = place(layer), place(max(layer - 1, 0))
    return {"group": group, "within": within, "group_before": group_before, "before": before}


ALBERT_LAYER = "encoder.albert_layer_groups.{group}.albert_layers.{within}."
ALBERT = replace(
    BERT,
    query=ALBERT_LAYER + "attention.query",
    key=ALBERT_LAYER + "attention.key",
    layers=lambda config, layer: config["num_hidden_layers"] * config.get("inner_group_num", 1),
    prefixes=("", "albert."),
    names=albert_names,
    input_norm=NormAt(
        "layer",
        "encoder.albert_layer_groups.{group_before}.albert_layers.{before}.full_layer_layer_norm",
        first=None,
        epsilon=EPSILON,
    ),
)

DISTILBERT = Attention(
    block="encoder",
    query="transformer.layer.{layer}.attention.q_lin",
    key="transformer.layer.{layer}.attention.k_lin",
    layers="n_layers|num_hidden_layers",
    heads="n_heads|num_attention_heads",
    d_model="dim|hidden_size",
    prefixes=("", "distilbert."),
    input_norm=NormAt(
        "layer", "transformer.layer.{previous}.output_layer_norm", first="embeddings.LayerNorm", epsilon=1e-12
    ),
    **both_biased(True),
)

# DeBERTa-v2: only the product of contents; the two products with positions are left out.


def deberta_terms(config: Config) -> list[str]:
    kinds = config.get("pos_att_type", [])
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    return [kind for kind in ("c2p", "p2c") if kind in (each.strip() for each in kinds)]


def deberta_scale(config: Config, layer: int) -> float:
    """1/√(d_head · number of terms), whether or not the relative terms are in use."""
    d_head = config.get("attention_head_size") or config["hidden_size"] // config["num_attention_heads"]
    return (d_head * (1 + len(deberta_terms(config)))) ** -0.5


def deberta_norm(config: Config, layer: int) -> NormAt:
    """The convolution of the xlarge models stands between the first layer and the second."""
    convolved = layer == 1 and config.get("conv_kernel_size", 0) > 0
    name = "encoder.conv.LayerNorm" if convolved else "encoder.layer.{previous}.output.LayerNorm"
    return NormAt("layer", name, first="embeddings.LayerNorm", epsilon=EPSILON)


def deberta_partial(config: Config) -> str | None:
    names = {"c2p": "content-to-position", "p2c": "position-to-content"}
    terms = deberta_terms(config) if config.get("relative_attention", False) else []
    return f"the {' and '.join(names[term] for term in terms)} terms left out" if terms else None


DEBERTA = replace(
    BERT,
    query="encoder.layer.{layer}.attention.self.query_proj",
    key="encoder.layer.{layer}.attention.self.key_proj",
    d_head=entry("attention_head_size", None),
    prefixes=("", "deberta."),
    input_norm=deberta_norm,
    scale=deberta_scale,
)

MPNET = replace(
    BERT,
    query="encoder.layer.{layer}.attention.attn.q",
    key="encoder.layer.{layer}.attention.attn.k",
    prefixes=("", "mpnet."),
    buckets=BucketsAt("encoder.relative_attention_bias", bidirectional=True, num_buckets=32),  # whatever is stated
)

# ModernBERT: pre-LN with rotary positions; some layers see all, the others a window on both sides.


def modernbert_kind(config: Config, layer: int) -> str:
    kinds = config.get("layer_types")
    if kinds is not None:
        return kinds[layer]
    return "sliding_attention" if layer % config.get("global_attn_every_n_layers", 3) else "full_attention"


def modernbert_rope(config: Config, layer: int) -> Mapping[str, object]:
    """Entries of a layer's positions: sliding layers have a base of their own; what the config says by layer wins."""
    kind = modernbert_kind(config, layer)
    entries = {"rope_type": "default", **config.get(f"rope_parameters.{kind}", {}), **config.get("rope_scaling", {})}
    everywhere = config.get("global_rope_theta", 160_000.0)
    base = config.get("local_rope_theta", 10_000.0) if kind == "sliding_attention" else everywhere
    return {"rope_theta": base, **entries}


def modernbert_window(config: Config, layer: int) -> int | None:
    return config.get("local_attention", 128) // 2 if modernbert_kind(config, layer) == "sliding_attention" else None


MODERNBERT = Attention(
    block="encoder",
    query="layers.{layer}.attn.Wqkv",
    key="layers.{layer}.attn.Wqkv",
    fused="qkv",
    prefixes=("", "model."),
    input_norm=NormAt(
        "layer",
        "layers.{layer}.attn_norm",
        first="embeddings.norm",
        epsilon=entry("norm_eps", 1e-5),
        biased=entry("norm_bias", False),
    ),
    rotary=RotaryAt(parameters=modernbert_rope),
    lookback=modernbert_window,
    lookahead=modernbert_window,
    query_bias=entry("attention_bias", False),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "bert",
        ("bert",),
        BERT_ROWS,
        partial=relative_terms,
        signature="encoder.layer.{layer}.attention.self.query.weight",
        inside=r"((cross)?attention\.(self\.(query|key|value)|output\.(dense|LayerNorm))|intermediate\.dense"
        r"|output\.(dense|LayerNorm))\.(weight|bias|gamma|beta)",
        needs=("embeddings.position_embeddings.weight", ".attention.self.query.bias", ".intermediate.dense.weight"),
    ),
    Family("roberta", ("roberta", "xlm-roberta", "camembert"), BERT_ROWS, partial=relative_terms),
    Family(
        "electra",
        ("electra",),
        (ELECTRA, ELECTRA_DECODER, BERT_CROSS),
        partial=relative_terms,
    ),
    Family("albert", ("albert",), (ALBERT,), partial=relative_terms),
    Family("distilbert", ("distilbert",), (DISTILBERT,)),
    Family("deberta-v2", ("deberta-v2",), (DEBERTA,), partial=deberta_partial),
    Family("mpnet", ("mpnet",), (MPNET,)),
    Family("modernbert", ("modernbert",), (MODERNBERT,)),
)
