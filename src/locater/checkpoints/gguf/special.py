"""Settings of single architectures that no table of names says: a function for each."""

import math
from collections.abc import Callable, Collection

from ...errors import refusal
from ...records import Json

Settings = Json
Names = Collection[str]
SLIDING, FULL = "sliding_attention", "full_attention"
AGAIN = "convert the model again with a newer llama.cpp"


def head_dim(own: Settings) -> int | None:
    length, width, heads = (
        own.get(key) for key in ("attention.key_length", "embedding_length", "attention.head_count")
    )
    if type(length) is int:
        return length
    return width // heads if type(width) is int and type(heads) is int and heads else None


def _llama(config: Json, own: Settings, names: Names) -> None:
    config.setdefault("head_dim", own.get("rope.dimension_count"))
    if config.pop("num_experts", 0):
        config |= {"model_type": "mixtral", "num_local_experts": own["expert_count"]}


def _glm4_moe(config: Json, own: Settings, names: Names) -> None:
    """Layers for further tokens are counted among the blocks; the norms of queries and keys are the larger models'."""
    further = own.get("nextn_predict_layers", 0)
    if type(further) is int and type(config.get("num_hidden_layers")) is int:
        config |= {"num_hidden_layers": config["num_hidden_layers"] - further, "num_nextn_predict_layers": further}
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in names


def _plain_rotary(config: Json, own: Settings, names: Names) -> None:
    """Its config class stretches where nothing is said; a file that does so holds the factors."""
    if "rope_freqs.weight" not in names and "rope_scaling" not in config:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.get("rope_theta")}


def _query_scale(largest: int) -> Callable[[Json, Settings, Names], None]:
    """Gemma scales by the head's size, except its largest model (known by its layers) by width over heads."""

    def finish(config: Json, own: Settings, names: Names) -> None:
        width, heads = own.get("embedding_length"), own.get("attention.head_count")
        is_largest = own.get("block_count") == largest and type(heads) is int and heads
        config["query_pre_attn_scalar"] = width // heads if is_largest and width else head_dim(own)

    return finish


def _latent(config: Json, own: Settings, names: Names) -> None:
    key = own.get("attention.key_length_mla", own.get("attention.key_length"))
    value = own.get("attention.value_length_mla", own.get("attention.value_length"))
    turned = own.get("rope.dimension_count")
    if type(key) is int and type(turned) is int:
        config |= {"qk_nope_head_dim": key - turned, "qk_head_dim": key, "v_head_dim": value}
    config["num_key_value_heads"] = own.get("attention.head_count")
    weight = own.get("rope.scaling.yarn_log_multiplier")
    if "rope_scaling" in config and isinstance(weight, float):
        # The converter writes a tenth of one of the two; llama.cpp takes the other to be equal.
        config["rope_scaling"] |= {"mscale": 10 * weight, "mscale_all_dim": 10 * weight}


def _deepseek(config: Json, own: Settings, names: Names) -> None:
    if own.get("expert_gating_func") == 2:  # sigmoid
        config["model_type"] = "deepseek_v3"


def _mistral4(config: Json, own: Settings, names: Names) -> None:
    """Logits that grow with the position are its own; the converter of its later files does not say how much."""
    growth = own.get("attention.temperature_scale", 0.1)
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    scaling |= {"mscale": 1.0} if "mscale" in scaling else {}  # as llama.cpp takes it for this architecture
    config["rope_parameters"] = scaling | {"rope_theta": config.get("rope_theta"), "llama_4_scaling_beta": growth}


def _falcon(config: Json, own: Settings, names: Names) -> None:
    keys = own.get("attention.head_count_kv", own.get("attention.head_count"))
    config |= {
        "num_kv_heads": keys,
        "multi_query": keys == 1,
        "new_decoder_architecture": "blk.0.attn_norm_2.weight" in names,
    }


def _stablelm(config: Json, own: Settings, names: Names) -> None:
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in names


def _mpt(config: Json, own: Settings, names: Names) -> None:
    slope = own.get("attention.max_alibi_bias", 0)
    is_real = isinstance(slope, float) and math.isfinite(slope) and slope > 0
    config["attn_config"] = {"alibi": is_real, "clip_qkv": own.get("attention.clamp_kqv"), "qk_ln": False}


# Models whose layers differ in heads, sizes and rotary positions.
def _gemma4(config: Json, own: Settings, names: Names) -> None:
    """Full layers have heads of another size and, where keys are the values, another number of them."""
    kinds, heads = _set_layer_types(config, own), _key_heads(config, own)
    small, large = (_count(own, f"attention.key_length{kind}") for kind in ("_swa", ""))
    config |= {"head_dim": small, "num_key_value_heads": heads.get(SLIDING, heads.get(FULL))}
    full = {"head_dim": large, "num_key_value_heads": heads.get(FULL)}
    config["per_layer_config"] = {str(layer): full for layer, kind in enumerate(kinds) if kind == FULL}
    turned = _count(own, "rope.dimension_count_swa") if "rope.dimension_count_swa" in own else small
    _set_rotary_by_layer_type(config, own, turned / small)
    # Which pairs of a full layer turn is said by a tensor: `rope.share_that_turns`.
    config["rope_parameters"].get(FULL, {}).update(rope_type="proportional", partial_rotary_factor=None)
    values = [f"blk.{layer}.attn_v.weight" for layer, kind in enumerate(kinds) if kind == FULL]
    config["attention_k_eq_v"] = not all(name in names for name in values)
    config["enable_moe_block"] = "blk.0.ffn_gate_inp.weight" in names
    if isinstance(widths := config.get("intermediate_size"), list) and widths:
        config |= {"intermediate_size": widths[0], "use_double_wide_mlp": len({*map(str, widths)}) > 1}


def _mimo2(config: Json, own: Settings, names: Names) -> None:
    """Its own code gives sliding layers twice the key heads; layers for further tokens are counted among the blocks."""
    further = own.get("nextn_predict_layers", 0)
    config["num_hidden_layers"] = _count(own, "block_count") - (further if type(further) is int else 0)
    _set_layer_types(config, own)
    heads = _key_heads(config, own)
    number = heads.get(FULL, heads.get(SLIDING, 0) // 2)
    if heads.get(SLIDING, 2 * number) != 2 * number:
        expected = "twice as many key heads in layers with a window as in others (MiMo-V2-Flash)"
        raise refusal(expected, f"{heads[SLIDING]} and {number}", "scan the model's safetensors")
    config["num_key_value_heads"] = number
    _set_rotary_by_layer_type(config, own, _count(own, "rope.dimension_count") / _count(own, "attention.key_length"))


def _set_layer_types(config: Json, own: Json) -> list[str]:
    """Set the layer types by the file's list of layers with a window."""
    pattern, number = own.get("attention.sliding_window_pattern"), config.get("num_hidden_layers")
    if not isinstance(pattern, list) or type(number) is not int or not 0 < number <= len(pattern):
        expected = "a list of the layers with a window (sliding_window_pattern) in the GGUF file"
        raise refusal(expected, f"{pattern!r:.40}", AGAIN)
    config["layer_types"] = [SLIDING if slides else FULL for slides in pattern[:number]]
    return config["layer_types"]


def _key_heads(config: Json, own: Json) -> dict[str, int]:
    """Key heads of each kind of layer, which must agree within a kind."""
    stored, kinds = own.get("attention.head_count_kv"), config["layer_types"]
    listed = stored if isinstance(stored, list) else [stored] * len(kinds)
    found: dict[str, int] = {}
    for kind, number in zip(kinds, [*listed, *[None] * len(kinds)], strict=False):
        if type(number) is not int or found.setdefault(kind, number) != number:
            raise refusal("one number of key heads for each kind of layer in the GGUF file", f"{stored!r:.60}")
    return found


def _set_rotary_by_layer_type(config: Json, own: Json, fraction: float) -> None:
    config.pop("rope_theta", None)
    if "rope_scaling" in config:
        raise refusal("rotary positions that are not stretched", f"{config['rope_scaling']!r:.60}")
    config["rope_parameters"] = {
        kind: {"rope_type": "default", "rope_theta": _base(own, key), "partial_rotary_factor": fraction}
        for kind, key in ((FULL, "rope.freq_base"), (SLIDING, "rope.freq_base_swa"))
        if kind in config["layer_types"]
    }


def _count(own: Json, key: str) -> int:
    value = own.get(key)
    if type(value) is not int or not 0 < value < 2**24:
        raise refusal(f"{key} in the GGUF file", f"{value!r:.40}", AGAIN)
    return value


def _base(own: Json, key: str) -> float:
    value = own.get(key)
    if not isinstance(value, float | int) or not 0 < value < math.inf:
        raise refusal(f"{key} in the GGUF file", f"{value!r:.40}", AGAIN)
    return float(value)


# Settings that say whether queries and keys have biases, and the stored tensor that tells.
BIASES = dict.fromkeys((
    "llama", "gemma", "gemma2", "gemma3", "gemma4", "hunyuan-dense", "hunyuan-moe", "mimo2", "glm4", "glm4moe", "arcee",
    "granite", "granitemoe", "apertus", "seed_oss", "dots1", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "olmo",
    "olmo2", "olmoe", "command-r", "cohere2", "gpt-oss", "smollm3", "nemotron",
), ("attention_bias", "attn_q"))  # fmt: skip
BIASES |= {"ernie4_5": ("use_bias", "attn_q"), "ernie4_5-moe": ("use_bias", "attn_q"), "falcon": ("bias", "attn_qkv")}
BIASES |= {"gptneox": ("attention_bias", "attn_qkv"), "stablelm": ("use_qkv_bias", "attn_q")}
FINISH: dict[str, tuple[Callable[[Json, Settings, Names], None], ...]] = {
    "llama": (_llama,),
    "mistral": (_llama,),
    "gemma2": (_query_scale(46),),
    "gemma3": (_query_scale(62),),
    "gemma4": (_gemma4,),
    "deepseek2": (_latent, _deepseek),
    "mistral4": (_latent, _mistral4),
    "mimo2": (_mimo2,),
    "falcon": (_falcon,),
    "stablelm": (_stablelm,),
    "mpt": (_mpt,),
    "glm4moe": (_glm4_moe,),
    "apertus": (_plain_rotary,),
}
