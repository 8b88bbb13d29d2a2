"""Settings of models whose layers differ in heads, sizes and rotary positions: Gemma 4 and MiMo-V2."""

import math
from collections.abc import Collection

from ...errors import refusal
from ...records import Json

SLIDING, FULL = "sliding_attention", "full_attention"
AGAIN = "convert the model again with a newer llama.cpp"


def gemma4(config: Json, own: Json, names: Collection[str]) -> None:
    """Full layers have heads of another size and, where keys are the values, another number of them."""
    kinds, heads = _add_kinds(config, own), _key_heads(config, own)
    small, large = (_count(own, f"attention.key_length{kind}") for kind in ("_swa", ""))
    config |= {"head_dim": small, "num_key_value_heads": heads.get(SLIDING, heads.get(FULL))}
    full = {"head_dim": large, "num_key_value_heads": heads.get(FULL)}
    config["per_layer_config"] = {str(layer): full for layer, kind in enumerate(kinds) if kind == FULL}
    turned = _count(own, "rope.dimension_count_swa") if "rope.dimension_count_swa" in own else small
    _add_rotary(config, own, turned / small)
    # Which pairs of a full layer turn is said by a tensor: `rope.share_that_turns`.
    config["rope_parameters"].get(FULL, {}).update(rope_type="proportional", partial_rotary_factor=None)
    values = [f"blk.{layer}.attn_v.weight" for layer, kind in enumerate(kinds) if kind == FULL]
    config["attention_k_eq_v"] = not all(name in names for name in values)
    config["enable_moe_block"] = "blk.0.ffn_gate_inp.weight" in names
    if isinstance(widths := config.get("intermediate_size"), list) and widths:
        config |= {"intermediate_size": widths[0], "use_double_wide_mlp": len({*map(str, widths)}) > 1}


def mimo2(config: Json, own: Json, names: Collection[str]) -> None:
    """Its own code gives sliding layers twice the key heads; layers for further tokens are counted among the blocks."""
    further = own.get("nextn_predict_layers", 0)
    config["num_hidden_layers"] = _count(own, "block_count") - (further if type(further) is int else 0)
    _add_kinds(config, own)
    heads = _key_heads(config, own)
    number = heads.get(FULL, heads.get(SLIDING, 0) // 2)
    if heads.get(SLIDING, 2 * number) != 2 * number:
        expected = "twice as many key heads in layers with a window as in others (MiMo-V2-Flash)"
        raise refusal(expected, f"{heads[SLIDING]} and {number}", "scan the model's safetensors")
    config["num_key_value_heads"] = number
    _add_rotary(config, own, _count(own, "rope.dimension_count") / _count(own, "attention.key_length"))


def _add_kinds(config: Json, own: Json) -> list[str]:
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


def _add_rotary(config: Json, own: Json, fraction: float) -> None:
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
