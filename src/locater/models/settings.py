"""Settings of a config that no cell of a model's rows asks for, though by their names they may change a logit."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ..errors import Refusal
from .places import Places
from .rope import rotary_of
from .schema import Attention, Config, Family, NormAt, RotaryAt, ask, resolve

# Words that mean a term of the logits, or what stands before them.
TELLING = re.compile(
    r"rope|rotary|alibi|soft_?cap|(^|_)qk_|qkv|attn|attention|window|sliding|temperature|relative|sink|clip_|theta"
    r"|logit_scale|scale_logits|query_pre|key_scale|causal|position_embedding_type|norm_type|norm_first"
)
# Names with such words that say nothing of a logit, or repeat what tensors show.
HARMLESS = re.compile(
    r"drop|implementation|init|_gain$|num_.*heads|n_head|head_dim|max_position|max_relative|bias$|output_attentions|return_"
    r"|cross_attention|checkpoint|kernel|flash|_cache|loss|mask_token|attention_types?$|final_logit|^logit_scale$"
    r"|_in_fp32$|contrastive|attention_out_multiplier|num_buckets|parallel_attn|attn_layer_(offset|period)|window_pattern$"
    r"|max_window_layers|every_n_layers|no_rope_layer_interval"
)

READ_ELSEWHERE = ("quantization_config", "quantization")  # by who makes numbers of the codes


class _Asked(dict[str, Any]):
    """A table that knows which of its entries were asked for."""

    def __init__(self, values: Mapping[str, Any], asked: set[str], path: str = "") -> None:
        super().__init__(values)
        self.asked, self.path = asked, path

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(f"{self.path}{key}")
        value = super().get(key, default)
        return _Asked(value, self.asked, f"{self.path}{key}.") if isinstance(value, Mapping) else value


def unread_settings(family: Family, config: Config, places: Sequence[Places]) -> list[str]:
    """The telling entries of a config, nested ones by their path, that no row asks for."""
    asked: set[str] = set()
    listening = Config(_Asked(config.values, asked))
    if family.partial is not None:
        ask(family.partial, listening)
    for at in places:
        _ask_all(replace(at, config=listening.within(at.row.config)))
    if any(at.row.rotary is not None for at in places):  # read where a layer turns at all
        asked |= {"rope_parameters", "rope_scaling", "rope_theta"}
    return sorted(path for path in telling(config.values) if not _was_asked(path, asked))


def _was_asked(path: str, asked: set[str]) -> bool:
    """Tell whether an entry, or a table that is taken whole, was asked for."""
    parts = path.split(".")
    return any(".".join(parts[: number + 1]) in asked for number in range(len(parts)))


def telling(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield entries, nested ones by their path, that by their names may change a logit."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from telling(value, f"{path}{key}.") if key not in READ_ELSEWHERE else ()
        elif isinstance(key, str) and TELLING.search(key) and not HARMLESS.search(key) and not _is_nothing(value):
            yield f"{path}{key}"


def _is_nothing(value: Any) -> bool:
    return isinstance(value, list | tuple) or value in (None, False, 0, "", "none", "default", "absolute")


def _ask_all(at: Places) -> None:
    """Every cell of a row for every layer; what refuses does so again when it is read."""
    for layer in at.layers:
        for column in fields(Attention):
            _ask(at, getattr(at.row, column.name), column.name, layer)
        try:
            rotary_of(at.row.rotary, at.config, layer=layer, d_head=at.shape(layer).d_head)
        except Refusal:
            continue


def _ask(at: Places, cell: Any, name: str, layer: int) -> None:
    try:
        if name == "alibi":
            cell = None if cell is None else ask(cell, at.config, 0)
        elif callable(cell):
            cell = ask(cell, at.config, layer)
        elif isinstance(cell, str) and name in CELLS:
            cell = resolve(cell, at.config, layer)
    except Refusal:
        return
    if is_dataclass(cell) and not isinstance(cell, type):
        for column in fields(cell):
            _ask(at, getattr(cell, column.name), column.name, layer)


def _cells(*kinds: type) -> frozenset[str]:
    """The columns whose words name entries of the config."""
    return frozenset(column.name for kind in kinds for column in fields(kind) if "Cell" in str(column.type))


CELLS = _cells(Attention, NormAt, RotaryAt) | {"max_distance", "num_buckets", "rank", "rows", "per_head"}
