"""From the settings of a GGUF file to the configuration that the model's own code would have saved."""

from ...errors import refusal
from ...models.config import Asked
from ...records import Json
from .architectures import ARCHITECTURES
from .names import COMMON, Architecture
from .special import BIASES, FINISH, Names, Settings, head_dim

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
    "rope.scaling.original_context_length",
)  # fmt: skip
NOT_CAUSAL = ("bert", "nomic-bert")
INSTEAD = "scan the model's safetensors instead, or ask for support with the file's architecture"
SAFETENSORS = "scan the model's safetensors, which say how its positions are stretched"


def architecture_of(settings: Settings) -> str:
    """The architecture of a file; llama.cpp files Mistral and Mixtral under `llama`."""
    name = settings.get("general.architecture")
    if not isinstance(name, str):
        raise refusal("general.architecture in the GGUF file", f"{name!r:.60}", "name the first part of a split file")
    if name == "llama" and "mistral" in str(settings.get("general.name", "")).lower():
        return "mistral"
    return name


def translate_settings(settings: Settings, names: Names) -> Json:
    """Settings by the names of the model's own code; those that tensors imply (biases, tied embeddings) included."""
    name, prefix = architecture_of(settings), f"{settings['general.architecture']}."
    row = ARCHITECTURES.get(name, Architecture(name))
    own = Asked({key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)})
    _check_counts(own)
    config: Json = {"model_type": row.model_type, **row.defaults}
    for key, renamed in (COMMON | dict(row.settings)).items():
        if renamed is not None and key in own:
            config[renamed] = own[key]
    config["tie_word_embeddings"] = "output.weight" not in names or name in ("falcon", "bloom")
    tokens = settings.get("tokenizer.ggml.tokens")
    config.setdefault("vocab_size", len(tokens) if isinstance(tokens, list) else tokens)
    _add_rotary(config, own, row, names)
    for finish in FINISH.get(name, ()):
        finish(config, own, names)
    if name in BIASES:
        config[BIASES[name][0]] = f"blk.0.{BIASES[name][1]}.bias" in names
    if name in ARCHITECTURES:
        _check_all_that_acts(own, row, name)
        _check_turned(config, own, row, name)
    return {key: value for key, value in config.items() if value is not None or key in row.defaults}


def _check_all_that_acts(own: Asked, row: Architecture, name: str) -> None:
    """Refuse settings that change logits and were not read; rows may say that a setting does nothing."""
    known = {*own.asked, *dict(row.settings), *COMMON, *HARMLESS}
    lost = [key for key in own if key.startswith(ACTING) and dict.get(own, key) and key not in known]
    if lost:
        raise refusal(f"{name} without {lost[0]}, as it is read here", f"{dict.get(own, lost[0])!r:.40}", INSTEAD)


def count_heads(settings: Settings, layer: int) -> tuple[int, int]:
    """Query and key heads of one layer; some models list them layer by layer."""
    prefix = f"{settings['general.architecture']}.attention."
    queries = settings.get(prefix + "head_count")
    keys = settings.get(prefix + "head_count_kv", queries)
    both = (value[layer] if isinstance(value, list) and layer < len(value) else value for value in (queries, keys))
    queries, keys = both
    if type(queries) is not int or type(keys) is not int or not 0 < keys <= queries:
        raise refusal("numbers of query and key heads in the GGUF file", f"{queries!r:.40} and {keys!r:.40}")
    return queries, keys


def _check_counts(own: Settings) -> None:
    for key in ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv"):
        values = own.get(key, 1)
        for value in values if isinstance(values, list) else [values]:
            if type(value) is not int or not 0 <= value < 2**24:
                raise refusal(f"a whole number as {key} in the GGUF file", f"{value!r:.60}", "fetch it again")


def _add_rotary(config: Json, own: Settings, row: Architecture, names: Names) -> None:
    """Base and stretching of rotary positions, with llama.cpp's own defaults: a class of the model may have others."""
    turned, size = own.get("rope.dimension_count"), head_dim(own)
    if row.partial_rotary and type(turned) is int and size:
        config[row.partial_rotary] = turned / size
    base = (COMMON | dict(row.settings))["rope.freq_base"]
    if base and turned is not None:
        config.setdefault(base, 10_000.0)
    kind, factor = own.get("rope.scaling.type", "linear"), own.get("rope.scaling.factor", 0.0)
    is_said = "rope_factors_long.weight" in names and factor in (0.0, 1.0)
    if kind not in ("none", "linear", "yarn") and not (kind == "longrope" and is_said):
        raise refusal(
            "rotary positions stretched in a way that the file says", f"{kind!r:.40}, {factor!r:.20}", SAFETENSORS
        )
    if kind == "yarn" or (kind == "linear" and factor not in (0.0, 1.0)):
        original = own.get("rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
        scaling |= {"original_max_position_embeddings": original} if original else {}
        config["rope_scaling"] = scaling | {name: own[key] for key, name in YARN.items() if key in own}


def _check_turned(config: Json, own: Asked, row: Architecture, name: str) -> None:
    """Refuse what a row takes for granted where the file says otherwise: heads that turn whole, and who sees whom."""
    turned, size = own.get("rope.dimension_count"), config.get("head_dim") or head_dim(own)
    is_read = row.partial_rotary or "rope.dimension_count" in row.settings or name in ("gemma4", "mimo2")
    if turned and size and turned != size and not is_read:
        raise refusal(f"heads of {name} that turn whole", f"{turned!r:.20} of {size!r:.20} dimensions", SAFETENSORS)
    if own.get("attention.causal", name not in NOT_CAUSAL) is (name in NOT_CAUSAL):
        raise refusal(f"{name} with the mask of its kind", f"attention.causal {name in NOT_CAUSAL}", INSTEAD)
