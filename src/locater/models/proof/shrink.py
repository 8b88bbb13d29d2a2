"""A config made small: sizes shrink by the names of their entries, everything that says *how* stays as it is."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from ...records import Json, JsonMapping


@dataclass(frozen=True)
class Sizes:
    """The twin's sizes. `d_head` differs from width/heads, so that a row cannot take one for the other by chance."""

    width: int = 64
    heads: int = 4
    key_heads: int = 2
    d_head: int = 24
    inner: int = 48
    least_layers: int = 2
    says_d_head: bool = False  # write it where the config leaves it open
    is_even: bool = True  # else a decoder has fewer heads and more layers than its encoder


# Tried in turn: some models demand that heads fill the width, or that all sizes of one kind agree.
ATTEMPTS = (
    Sizes(is_even=False),
    Sizes(),
    Sizes(d_head=16, says_d_head=True, is_even=False),
    Sizes(d_head=16, says_d_head=True),
    Sizes(d_head=16, inner=64, least_layers=4),
    Sizes(d_head=16, key_heads=4, inner=64),
    Sizes(width=128, heads=2, d_head=64, key_heads=1),
    Sizes(width=256, heads=2, d_head=128, key_heads=1, inner=64),
)
MOST_LAYERS, VOCABULARY, WINDOW, CHUNK = 8, 160, 5, 6

WIDTH = re.compile(
    r"(hidden_size|d_model|n_embd|n_embed|embed_dim|embedding_size|dim|hidden_dim|encoder_hidden_size|"
    r"decoder_hidden_size|text_hidden_size|out_hidden_size|output_dim|projection_dim|proj_dim|mm_hidden_size|"
    r"cross_attention_hidden_size|input_dim|output_hidden_size|vision_feature_dim|d_embed|model_dim|"
    r"word_embed_proj_dim|embedding_dim|input_embed_dim|(\w+_)?hidden_size|attention_hidden_size|num_features)$"
)
HEADS = re.compile(r"(\w*num_(attention_)?heads|n_heads?|\w*attention_heads|num_attn_heads)$")
KEY_HEADS = re.compile(r"(\w*num_key_value_heads|num_kv_heads|n_head_kv|kv_n_heads|num_query_groups)$")
HEAD_SIZE = re.compile(r"(\w*head_dim|attention_head_size|d_kv|kv_channels|attention_head_dim)$")
LAYERS = re.compile(
    r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|depth|num_decoder_layers|"
    r"num_encoder_layers|num_blocks|(\w+_)?num_hidden_layers|num_transformer_layers|encoder_depth)$"
)
INNER = re.compile(r"(\w*intermediate_size|\w*ffn_dim|d_ff|n_inner|ffn_hidden_size|\w*mlp_dim|feed_forward_\w+_size)$")
EXPERTS = re.compile(r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$")
CHOSEN = re.compile(r"(num_experts_per_tok|moe_k|moe_top_?k|top_k|num_experts_per_token|top_k_experts)$")
EXACT: Json = {
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "qk_head_dim": 20, "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "image_size": 32,
    "patch_size": 8, "n_group": 1, "topk_group": 1, "sliding_window": WINDOW, "attention_chunk_size": CHUNK,
    "mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 32, "mamba_head_dim": 32, "mamba_n_groups": 1,
    "n_groups": 1, "mamba_d_state": 16, "ssm_state_size": 16, "mamba_d_ssm": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "hidden_size_per_layer_input": 16, "conv_dim": 32, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "max_source_positions": 24, "first_k_dense_replace": 1,
    "moe_layer_start_index": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "index_kpool": 4,
    "n_shared_experts": 1, "num_shared_experts": 1, "num_mel_bins": 16, "rotary_dim": 8, "local_attention": 6,
    "codebook_size": 64, "num_quantizers": 2, "mask_token_id": 3, "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
}  # fmt: skip
# What a config class leaves null although its model does not run so.
UNSAID: Json = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}  # where null would not run
STAGES = ("out_features", "out_indices", "_out_features", "_out_indices", "stage_names")  # named for layers that go
TOKENS = re.compile(r"\w*(_token_id|_token_index|_token_ids?|_idx|_id)$")
CHOICE = re.compile(r"\w*(layers|indices|indexes|_idx|_ids)$")  # lists of some layers' numbers
PERIODS = re.compile(r"\w*(interval|period|every_n\w*|_pattern|_freq|_step)$")


def shrink(values: JsonMapping, sizes: Sizes) -> Json:
    """The config's values with every size made small, parts of a composite config one by one."""
    num_layers = _num_layers(values, sizes)  # too few, and a kind of layer that the model has would not be proven
    depth = next((v for k, v in values.items() if LAYERS.match(k) and isinstance(v, int)), None)
    small: Json = {}
    ids = iter(range(VOCABULARY - 1, 4, -1))
    for key, value in (UNSAID | dict(values)).items():
        if key in STAGES or (key in UNSAID and key not in values):
            continue
        if value is None and (key in UNSAID or (key == "head_dim" and sizes.says_d_head)):
            small[key] = UNSAID.get(key, sizes.d_head)
        elif key == "per_layer_config" and isinstance(value, Mapping):
            small[key] = _overrides(value, values, num_layers, sizes)
        elif key == "layer_types" and isinstance(value, list):
            small[key] = _types(value, num_layers)
        elif key == "num_kv_shared_layers" and value:
            small[key] = num_layers // 2
        elif key == "num_attention_heads_per_layer" and isinstance(value, list):
            small[key] = [_other_size("num_attention_heads", one, values, sizes) for one in value[:num_layers]]
        elif isinstance(value, Mapping) and (key.endswith("config") or "model_type" in value):
            small[key] = shrink(value, sizes)
        elif CHOICE.match(key) and isinstance(value, list) and _is_choice(value, depth):
            small[key] = [layer for layer in value if layer < num_layers] or [num_layers - 1]
        elif isinstance(value, list) and depth and len(value) == depth and depth > 2:
            small[key] = value[:num_layers]
        else:
            small[key] = _entry(key, value, values, sizes, num_layers, ids)
    if "qk_rope_head_dim" in small and "head_dim" in small:  # latent attention calls so what turns, or the whole
        whole = values["head_dim"] == values["qk_rope_head_dim"] + (values.get("qk_nope_head_dim") or 0)
        small["head_dim"] = small["qk_rope_head_dim"] + (small["qk_nope_head_dim"] if whole else 0)
    if isinstance(small.get("rope_parameters"), Mapping):
        small["rope_parameters"] = _rope(small["rope_parameters"], small, sizes)
    if "mrope_section" in small:
        small["mrope_section"] = _sections(small["mrope_section"], small.get("head_dim") or sizes.width // sizes.heads)
    return small


def _entry(key: str, value: object, values: Mapping, sizes: Sizes, num_layers: int, ids: Iterator[int]) -> Any:
    if key == "conv_dim" and isinstance(value, list | tuple):
        return [EXACT[key]] * len(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if TOKENS.match(key):
        return value if value < 3 else next(ids)
    if key in EXACT:
        return min(EXACT[key], value) if value > 0 else value
    if not sizes.is_even and "decoder" in key:  # the encoder's entries would be taken for those of both
        sizes = replace(sizes, heads=sizes.heads // 2, key_heads=sizes.key_heads // 2)
        num_layers += 1
    for pattern, size in (
        (LAYERS, num_layers), (KEY_HEADS, sizes.key_heads), (HEAD_SIZE, sizes.d_head), (HEADS, sizes.heads),
        (INNER, sizes.inner), (EXPERTS, 4), (CHOSEN, 2), (WIDTH, sizes.width),
    ):  # fmt: skip
        if pattern.match(key) and value > 0:
            if pattern is KEY_HEADS and value == 1:
                return 1
            heads = next((v for k, v in values.items() if k in ("num_attention_heads", "n_head", "num_heads")), None)
            return sizes.heads if pattern is KEY_HEADS and value == heads else size
    return value


def _is_choice(value: object, depth: int | None) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or not value or not depth or len(value) == depth:
        return False
    return all(isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < depth for layer in value)


def _num_layers(values: JsonMapping, sizes: Sizes) -> int:
    """Enough that every kind of layer is there."""
    kinds, needed = values.get("layer_types"), sizes.least_layers
    if isinstance(kinds, list) and kinds:
        first = [kinds.index(kind) + 1 for kind in dict.fromkeys(kinds)]
        needed = max(needed, min(max(first), MOST_LAYERS))
        if values.get("num_kv_shared_layers"):  # its last layers take the keys of others of their kind
            return 2 * len(first)
    for key, value in values.items():
        if PERIODS.match(key) and isinstance(value, int) and not isinstance(value, bool) and 1 < value <= MOST_LAYERS:
            needed = max(needed, value)
    turning = list(map(bool, values.get("no_rope_layers") or ()))
    if len(set(turning)) == 2:
        needed = max(needed, min(max(map(turning.index, (True, False))) + 1, MOST_LAYERS))
    return needed


def _types(kinds: list, num_layers: int) -> list:
    """The first layers' kinds; a kind that comes later still takes the last places."""
    if num_layers == 2 * len(dict.fromkeys(kinds)):
        return [*dict.fromkeys(kinds)] * 2
    taken = list(kinds[:num_layers])
    missing = [kind for kind in dict.fromkeys(kinds) if kind not in taken]
    return taken[: num_layers - len(missing)] + missing


def _overrides(entries: Mapping, values: JsonMapping, num_layers: int, sizes: Sizes) -> Json:
    """Copy settings of single layers to the twin's layers of the same kinds."""
    own, kinds = {int(layer): entry for layer, entry in entries.items()}, values.get("layer_types")
    small: Json = {}
    for layer in range(num_layers):
        source = kinds.index(_types(kinds, num_layers)[layer]) if isinstance(kinds, list) and kinds else layer
        if isinstance(entry := own.get(source), Mapping):
            small[str(layer)] = {key: _other_size(key, value, values, sizes) for key, value in entry.items()}
    return small


def _other_size(key: str, value: Any, values: JsonMapping, sizes: Sizes) -> Any:
    """Larger or smaller than the twin's own number where it is so in the model."""
    own = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value == own:
        return _entry(key, value, values, sizes, 0, iter(()))
    if KEY_HEADS.match(key):
        return 1 if value < (own or value) else sizes.heads
    if HEADS.match(key):
        return sizes.heads // 2 if value < (own or value) else 2 * sizes.heads
    return sizes.d_head + 8 if HEAD_SIZE.match(key) else value


def _rope(entries: JsonMapping, values: JsonMapping, sizes: Sizes) -> Json:
    d_head = values.get("head_dim") or sizes.width // sizes.heads
    small: Json = {}
    for key, value in entries.items():
        if isinstance(value, Mapping):
            small[key] = _rope(value, values, sizes)
        elif key == "partial_rotary_factor" and "qk_rope_head_dim" in values and value and value < 1:
            small[key] = values["qk_rope_head_dim"] / d_head
        elif key == "mrope_section" and isinstance(value, list):
            small[key] = _sections(value, int(d_head * (entries.get("partial_rotary_factor") or 1)))
        elif key in ("short_factor", "long_factor") and isinstance(value, list):
            small[key] = value[: int(d_head * (entries.get("partial_rotary_factor") or 1)) // 2]
        else:
            small[key] = value
    return small


def _sections(sections: list, num_dims: int) -> list[int]:
    """Pairs shared out as before: the first part takes what rounding leaves."""
    pairs, total = num_dims // 2, sum(sections) or 1
    parts = [math.floor(pairs * part / total) for part in sections]
    return [parts[0] + pairs - sum(parts), *parts[1:]]
