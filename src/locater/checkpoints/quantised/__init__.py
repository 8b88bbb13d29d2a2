"""Quantised checkpoints, read as if they were not: each weight under its plain name, computed when it is asked for."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...errors import Refusal, bad_value, instead
from ...records import Json, JsonMapping
from ..base import QUANTISATION, Checkpoint, Entry, Rows
from . import declared, packed, stacked
from .weight import REMEDY, Find, QuantisedWeight, unknown, word

# By `quant_method` of the config.
METHODS: dict[str, tuple[Find, ...]] = {
    "fp8": (declared.find_eight_bits,),
    "fbgemm_fp8": (declared.find_eight_bits,),
    "mxfp8": (declared.find_eight_bits,),
    "modelopt": (declared.find_modelopt,),
    "compressed-tensors": (declared.find_eight_bits, declared.find_four_bits, *declared.find_whole_numbers),
    "gptq": (packed.find_gptq,),
    "awq": (packed.find_awq,),
    "bitsandbytes": (stacked.find_bitsandbytes, stacked.find_bitsandbytes_8),
    "quanto": stacked.find_quanto,
    "torchao": (packed.find_torchao,),
    "hqq": (stacked.find_hqq,),
    "mlx": (packed.find_mlx,),
    "mxfp4": (),  # of the experts only
}
# What says of itself all that is needed.
SELF_DESCRIBING = (declared.find_eight_bits, *METHODS["bitsandbytes"], packed.find_torchao, stacked.find_hqq)
# How the tensors of packed weights end, by which they are known where the config is silent.
PACKED = (".qweight", ".weight_packed", ".weight._data", ".weight._data._data")
# How activations were quantised: they do not change a weight.
ACTIVATIONS = (
    "input_scale", "output_scale", "activation_scale", "input_global_scale", "input_zero_point", "k_scale", "v_scale",
    "q_scale", "input_scale_ub",
)  # fmt: skip
# Settings that are read here, and those that tell how a file was made, which modules were left out and how it is run.
# Whatever else is set may change a weight or act beside it (a rotation, a scale of the inputs): it is refused by name.
READ = (
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "version", "checkpoint_format", "format", "sym",
    "desc_act", "config_groups", "weight_block_size", "quant_algo", "weights", "mode", "hidden_size",
)  # fmt: skip
MADE = (
    "dataset", "tokenizer", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "meta",
    "act_group_aware", "model_seqlen", "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs",
    "producer", "model_name_or_path", "model_file_base_name", "global_compression_ratio", "quantization_status",
    "quant_type", "quant_type_kwargs", "quant_config", "nbits", "axis", "view_as_float", "zero_point",
)  # fmt: skip
LEFT_OUT = (
    "modules_to_not_convert", "modules_to_convert", "ignore", "ignored_layers", "exclude_modules", "skip_modules",
    "modules_in_block_to_quantize", "block_name_to_quantize", "module_name_preceding_first_block", "lm_head",
    "include_input_output_embeddings", "untie_embedding_weights", "dynamic", "dynamic_config",
)  # fmt: skip
RUN = (
    "backend", "use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16", "pack_dtype", "do_fuse", "fmt",
    "fuse_max_seq_len", "modules_to_fuse", "run_compressed", "dequantize", "use_optimized_inference", "scale_fmt",
    "activation_scheme", "activations", "activation_scale_ub", "kv_cache_scheme", "kv_cache_quant_algo", "expert_dtype",
    "load_in_8bit", "load_in_4bit", "_load_in_8bit", "_load_in_4bit",
)  # fmt: skip
KNOWN = frozenset(READ + MADE + LEFT_OUT + RUN)
KNOWN_BEGINNINGS = ("llm_int8_", "bnb_4bit_")


class Dequantised(Checkpoint):
    """A checkpoint with its weights computed; a read costs the stored parts of what is asked for, where rows allow."""

    def __init__(self, store: Checkpoint, weights: dict[str, QuantisedWeight]) -> None:
        self.store, self.weights, self.format = store, weights, store.format
        super().__init__(_Entries(store, weights), config=store.config, place=store.place, parts=[store])

    def fetch(self, name: str, rows: Rows | None) -> Tensor:
        weight = self.weights.get(name)
        if weight is None:
            return self.store.read(name, rows)
        with _fitting(weight):
            return weight.read(rows)


class _Entries(Mapping[str, Entry]):
    """Names at once, shapes when asked for: some methods keep them in small tensors."""

    def __init__(self, store: Checkpoint, weights: dict[str, QuantisedWeight]) -> None:
        self.store, self.weights = store, weights
        taken = {name for weight in weights.values() for name in weight.parts.values()}
        modules = {name.rpartition(".")[0] for name in weights}
        about = (name for name in store.names if name.rpartition(".")[2] in ACTIVATIONS)
        taken |= {name for name in about if name.rpartition(".")[0] in modules}
        plain = (name for name in store.names if name not in taken)
        self.order = dict.fromkeys([*plain, *weights])

    def __getitem__(self, name: str) -> Entry:
        if name in self.weights:
            with _fitting(self.weights[name]):
                return Entry(self.weights[name].shape, torch.float32)
        if name not in self.order:
            raise KeyError(name)
        return self.store.entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self.order

    def __iter__(self) -> Iterator[str]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def _fitting(weight: QuantisedWeight) -> AbstractContextManager[None]:
    """Refuse untrusted parts that pass each check and yet fail in the arithmetic together, in any way."""

    def refused(cause: Exception) -> Refusal:
        shapes = ", ".join(f"{role} {[*weight.store.shape(name)]}" for role, name in weight.parts.items())
        return bad_value(f"parts of `{weight.name[:120]}` that go together", shapes[:200], REMEDY)

    return instead(refused, (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError))


def dequantised(store: Checkpoint) -> Checkpoint:
    """Let packed weights read as plain ones; a checkpoint without any stays itself. Refuses an unknown method."""
    settings = _settings(store.config)
    method = word(settings, "quant_method")
    if method and method not in METHODS:
        raise unknown(method)
    _check_known(store, settings, method)
    finders = METHODS[method] if method else SELF_DESCRIBING
    weights = {weight.name: weight for find in finders for weight in find(store, settings)}
    packed_names = ((name, end) for name in store.names for end in PACKED if name.endswith(end))
    left = next((name for name, end in packed_names if f"{name.removesuffix(end)}.weight" not in weights), None)
    if left is not None:
        said = f"quant_method `{method}`" if method else "no quant_method"
        raise bad_value(f"a config that says how `{left[:120]}` is packed", said, f"fetch config.json too, or {REMEDY}")
    return Dequantised(store, weights) if weights else store


def _check_known(store: Checkpoint, settings: JsonMapping, method: str) -> None:
    """Refuse settings that are not known to be read or harmless; MLX writes those of a module under its name."""
    for key, value in settings.items():
        is_module = method == "mlx" and ("." in key or f"{key}.weight" in store.names)
        is_dense = key == "sparsity_config" and isinstance(value, Mapping) and value.get("format", "dense") == "dense"
        if value and key not in KNOWN and not key.startswith(KNOWN_BEGINNINGS) and not is_module and not is_dense:
            raise bad_value(f"settings of `{method}` that are read here", f"`{key[:60]}` as well", REMEDY)


def _settings(config: JsonMapping) -> Json:
    """Quantisation settings of the config; MLX gives bits and groups and no name."""
    inner = config.get("text_config")
    places = [part.get(key) for part in (config, inner) if isinstance(part, Mapping) for key in QUANTISATION]
    settings = next((dict(place) for place in places if isinstance(place, Mapping)), {})
    if settings and "quant_method" not in settings:
        if "bits" in settings and "group_size" in settings:
            settings["quant_method"] = "mlx"
        elif "quant_algo" in settings:
            settings["quant_method"] = "modelopt"
    return settings | {"hidden_size": config.get("hidden_size")} if settings else {}
