"""From the settings of a GGUF file to the configuration that the model's own code would have saved."""

import math
from collections.abc import Callable, Collection
from typing import Any

from ...errors import refusal
from ...records import Json
from . import by_layer
from .architectures import ARCHITECTURES
from .names import COMMON, Architecture

Settings = Json
Names = Collection[str]
YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}

# Where settings stand that change logits, and those among them that do not: of values, of what training was, or told by
# the tensors themselves.
ACTING = ("attention.", "rope.")
HARMLESS = (
    "attention.value_length", "attention.value_length_mla", "attention.key_length_mla", "attention.causal",
    "attention.group_norm_groups", "attention.group_norm_epsilon", "attention.output_scale", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.factor", "rope.dimension_count",
)  # fmt: skip


class _Read(dict[str, Any]):
    """Settings that know which of them were asked for."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def architecture_of(settings: Settings) -> str:
    """The architecture of a file; llama.cpp files Mistral and Mixtral under `llama`."""
    name = settings.get("general.architecture")
    if not isinstance(name, str):
        raise refusal("general.architecture in the GGUF file", f"{name!r:.60}", "name the first part of a split file")
    if name == "llama" and "mistral" in str(settings.get("general.name", "")).lower():
        return "mistral"
    return name


def make_config(settings: Settings, names: Names) -> Json:
    """Settings by the names of the model's own code; those that tensors imply (biases, tied embeddings) included."""
    name, prefix = architecture_of(settings), f"{settings['general.architecture']}."
    row = ARCHITECTURES.get(name, Architecture(name))
    own = _Read({key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)})
    _check_counts(own)
    config: Json = {"model_type": row.model_type, **row.defaults}
    for key, renamed in (COMMON | dict(row.settings)).items():
        if renamed is not None and key in own:
            config[renamed] = own[key]
    config["tie_word_embeddings"] = "output.weight" not in names or name in ("falcon", "bloom")
    tokens = settings.get("tokenizer.ggml.tokens")
    config.setdefault("vocab_size", len(tokens) if isinstance(tokens, list) else tokens)
    _add_rotary(config, own, row)
    for finish in FINISH.get(name, ()):
        finish(config, own, names)
    if name in ARCHITECTURES:
        _check_all_that_acts(own, row, name)
    return {key: value for key, value in config.items() if value is not None or key in row.defaults}


def _check_all_that_acts(own: _Read, row: Architecture, name: str) -> None:
    """Refuse settings that change logits and were not read; rows may say that a setting does nothing."""
    known = {*own.asked, *dict(row.settings), *COMMON, *HARMLESS}
    lost = [key for key in own if key.startswith(ACTING) and dict.get(own, key) and key not in known]
    if lost:
        remedy = "scan the model's safetensors instead, or ask for support with the file's architecture"
        raise refusal(f"{name} without {lost[0]}, as it is read here", f"{dict.get(own, lost[0])!r:.40}", remedy)


def num_heads(settings: Settings, layer: int) -> tuple[int, int]:
    """Query and key heads of one layer; some models list them layer by layer."""
    prefix = f"{settings['general.architecture']}.attention."
    queries = settings.get(prefix + "head_count")
    keys = settings.get(prefix + "head_count_kv", queries)
    queries, keys = (value[layer] if _reaches(value, layer) else value for value in (queries, keys))
    if type(queries) is not int or type(keys) is not int or not 0 < keys <= queries:
        raise refusal("numbers of query and key heads in the GGUF file", f"{queries!r:.40} and {keys!r:.40}")
    return queries, keys


def _reaches(value: object, layer: int) -> bool:
    return isinstance(value, list) and layer < len(value)


def _check_counts(own: Settings) -> None:
    for key in ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv"):
        values = own.get(key, 1)
        for value in values if isinstance(values, list) else [values]:
            if type(value) is not int or not 0 <= value < 2**24:
                raise refusal(f"a whole number as {key} in the GGUF file", f"{value!r:.60}", "fetch it again")


def _head_dim(own: Settings) -> int | None:
    length, width, heads = (
        own.get(key) for key in ("attention.key_length", "embedding_length", "attention.head_count")
    )
    if type(length) is int:
        return length
    return width // heads if type(width) is int and type(heads) is int and heads else None


def _add_rotary(config: Json, own: Settings, row: Architecture) -> None:
    turned, head_dim = own.get("rope.dimension_count"), _head_dim(own)
    if row.partial_rotary and type(turned) is int and head_dim:
        config[row.partial_rotary] = turned / head_dim
    kind = own.get("rope.scaling.type")
    if kind in ("linear", "yarn"):
        original = own.get("rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
        scaling |= {"original_max_position_embeddings": original} if original else {}
        config["rope_scaling"] = scaling | {name: own[key] for key, name in YARN.items() if key in own}


def _fill_head_dim(config: Json, own: Settings, names: Names) -> None:
    config.setdefault("head_dim", own.get("rope.dimension_count"))


def _mixtral(config: Json, own: Settings, names: Names) -> None:
    if config.pop("num_experts", 0):
        config |= {"model_type": "mixtral", "num_local_experts": own["expert_count"]}


def _attention_bias(config: Json, own: Settings, names: Names) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in names


def _glm4_moe(config: Json, own: Settings, names: Names) -> None:
    """Layers for further tokens are counted among the blocks; the norms of queries and keys are the larger models'."""
    further = own.get("nextn_predict_layers", 0)
    if type(further) is int and type(config.get("num_hidden_layers")) is int:
        config |= {"num_hidden_layers": config["num_hidden_layers"] - further, "num_nextn_predict_layers": further}
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in names
    _attention_bias(config, own, names)


def _plain_rotary(config: Json, own: Settings, names: Names) -> None:
    """Its config class stretches where nothing is said; a file that does so holds the factors."""
    if "rope_freqs.weight" not in names and "rope_scaling" not in config:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.get("rope_theta")}


def _ernie(config: Json, own: Settings, names: Names) -> None:
    config["use_bias"] = "blk.0.attn_q.bias" in names


def _query_scale(largest: int) -> Callable[[Json, Settings, Names], None]:
    """Gemma scales by the head's size, except its largest model (known by its layers) by width over heads."""

    def finish(config: Json, own: Settings, names: Names) -> None:
        width, heads = own.get("embedding_length"), own.get("attention.head_count")
        is_largest = own.get("block_count") == largest and type(heads) is int and heads
        config["query_pre_attn_scalar"] = width // heads if is_largest and width else _head_dim(own)

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
        "bias": "blk.0.attn_qkv.bias" in names,
    }


def _stablelm(config: Json, own: Settings, names: Names) -> None:
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in names
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in names


def _neox(config: Json, own: Settings, names: Names) -> None:
    config["attention_bias"] = "blk.0.attn_qkv.bias" in names


def _mpt(config: Json, own: Settings, names: Names) -> None:
    slope = own.get("attention.max_alibi_bias", 0)
    is_real = isinstance(slope, float) and math.isfinite(slope) and slope > 0
    config["attn_config"] = {"alibi": is_real, "clip_qkv": own.get("attention.clamp_kqv"), "qk_ln": False}


FINISH: dict[str, tuple[Callable[[Json, Settings, Names], None], ...]] = {
    "llama": (_fill_head_dim, _mixtral, _attention_bias),
    "mistral": (_fill_head_dim, _mixtral),
    "gemma2": (_query_scale(46), _attention_bias),
    "gemma3": (_query_scale(62), _attention_bias),
    "deepseek2": (_latent, _deepseek),
    "mistral4": (_latent, _mistral4),
    "hunyuan-dense": (_attention_bias,),
    "hunyuan-moe": (_attention_bias,),
    "gemma4": (by_layer.gemma4, _attention_bias),
    "mimo2": (by_layer.mimo2, _attention_bias),
    "falcon": (_falcon,),
    "stablelm": (_stablelm,),
    "gptneox": (_neox,),
    "mpt": (_mpt,),
    "glm4moe": (_glm4_moe,),
    "ernie4_5": (_ernie,),
    "ernie4_5-moe": (_ernie,),
    "arcee": (_attention_bias,),
    "granite": (_attention_bias,),
    "granitemoe": (_attention_bias,),
    "apertus": (_attention_bias, _plain_rotary),
    "seed_oss": (_attention_bias,),
    "dots1": (_attention_bias,),
    "qwen3": (_attention_bias,),
    "qwen3moe": (_attention_bias,),
    "qwen3vl": (_attention_bias,),
    "qwen3vlmoe": (_attention_bias,),
    "olmo": (_attention_bias,),
    "olmo2": (_attention_bias,),
    "olmoe": (_attention_bias,),
    "command-r": (_attention_bias,),
    "cohere2": (_attention_bias,),
    "gemma": (_attention_bias,),
    "gpt-oss": (_attention_bias,),
    "smollm3": (_attention_bias,),
    "nemotron": (_attention_bias,),
    "glm4": (_attention_bias,),
}
