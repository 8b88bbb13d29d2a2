"""A row as plain words and numbers, so that it can be kept in JSON: cells that are functions go by their names here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...records import JsonMapping
from ..config import Cell, Config, entry
from ..registry import FAMILIES
from ..schema import Attention, NormAt, RotaryAt

Rule = Callable[[Config, int], Any]


def _kind(config: Config, layer: int) -> str | None:
    kinds = config.get("layer_types")
    return None if kinds is None else kinds[layer]


def _slides(config: Config, layer: int) -> bool:
    return _kind(config, layer) == "sliding_attention"


# Which layers: of those that turn, or whose queries and keys are normed.
LAYERS: dict[str, Rule] = {
    "every layer": lambda config, layer: True,
    "sliding layers": _slides,
    "full layers": lambda config, layer: not _slides(config, layer),
    "no_rope_layers": lambda config, layer: bool(config["no_rope_layers"][layer]),
}


def _entry_of_layer(key: str) -> Rule:
    """Transformers' `per_layer_config` of one layer; its keys are numbers, written in one way or another."""

    def rule(config: Config, layer: int) -> Any:
        entries = config.get("per_layer_config") or {}
        own = next((entry for number, entry in entries.items() if int(number) == layer), {})
        return own.get(key, config[key]) if entries else None

    return rule


# Numbers of heads and of key heads: what the config says of single layers first, then its one number for all.
HEADS: dict[str, Cell] = {
    "num_attention_heads by layer": _entry_of_layer("num_attention_heads"),
    "num_attention_heads_per_layer": lambda config, layer: config["num_attention_heads_per_layer"][layer],
    **{
        key: key
        for key in ("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads")
    },
}
KEY_HEADS: dict[str, Cell] = {
    "num_key_value_heads by layer": _entry_of_layer("num_key_value_heads"),
    **{key: key for key in ("num_key_value_heads", "encoder_num_key_value_heads", "decoder_num_key_value_heads")},
    "num_key_value_heads, twice on sliding layers": lambda config, layer: (
        config["num_key_value_heads"] * (2 if _slides(config, layer) else 1)
    ),
}


# What queries times keys is multiplied by; None of the schema is 1/√d_head.
SCALES: dict[str, Cell] = {
    "1/√d_head": None,
    "1": 1.0,
    "1/√query_pre_attn_scalar": lambda config, layer: config["query_pre_attn_scalar"] ** -0.5,
    "attention_multiplier": lambda config, layer: float(config["attention_multiplier"]),
    "1/(layer √d_head)": lambda config, layer: (
        (config.get("head_dim") or config["hidden_size|d_model"] // config["num_attention_heads"]) ** -0.5 / (layer + 1)
    ),
}

# The config's own word first: in a twin it may equal the width by the heads, in the model it need not.
SIZES: dict[str, Cell] = {"head_dim by layer": _entry_of_layer("head_dim"), "head_dim": "head_dim", "width/heads": None}


def _window(key: str, which: str = "every layer", less: int = 1, part: int = 1) -> Rule:
    def lookback(config: Config, layer: int) -> int | None:
        size = config.get(key)
        return None if size is None or not LAYERS[which](config, layer) else size // part - less

    return lookback


WINDOWS: dict[str, Cell] = {
    "none": None,
    "sliding_window": _window("sliding_window"),
    "sliding_window on sliding layers": _window("sliding_window", "sliding layers"),
    "sliding_window + 1": _window("sliding_window", less=0),
    "sliding_window + 1 on sliding layers": _window("sliding_window", "sliding layers", less=0),
    "half of sliding_window on sliding layers": _window("sliding_window", "sliding layers", less=0, part=2),
    "half of local_attention on sliding layers": _window("local_attention", "sliding layers", less=0, part=2),
    "half of sliding_window": _window("sliding_window", less=0, part=2),
}
CAPS = ("attn_logit_softcapping",)


FRACTIONS = ("", "partial_rotary_factor")
PARAMETERS: dict[str, Cell] = {
    "one": None,
    "by layer type": lambda config, layer: config["rope_parameters"][_kind(config, layer)],
}


def norm_cell(recipe: JsonMapping | None) -> Any:
    """A norm that all layers have, or those of a rule."""
    if recipe is None:
        return None
    at, only = NormAt(**{key: value for key, value in recipe.items() if key != "only"}), recipe.get("only")
    if only in (None, "every layer"):
        return at
    return lambda config, layer: at if LAYERS[only](config, layer) else None


def rotary_cell(recipe: JsonMapping | None) -> RotaryAt | None:
    if recipe is None:
        return None
    key = recipe.get("fraction", "")
    fraction: Cell = (lambda config, layer: config[key]) if key else 1.0
    return RotaryAt(
        base=entry("rope_theta|rotary_emb_base", 10_000.0),
        fraction=recipe.get("literal_fraction", fraction),
        num_dims=recipe.get("num_dims"),
        start=recipe.get("start", 0),
        interleaved=recipe["interleaved"],
        backward=recipe.get("backward", False),
        only=LAYERS[recipe.get("only", "every layer")],
        parameters=PARAMETERS[recipe.get("parameters", "one")],
    )


def row_of(recipe: JsonMapping) -> Attention:
    """The table row that a recipe spells: a row of the tables under this model's prefix, or one of its own."""
    # Biases as the twin has them; a recipe that is not settled yet takes what is stored.
    shared: dict[str, Any] = {column: recipe.get(column) for column in ("sink", "query_bias", "key_bias")}
    shared |= dict(sink_only=LAYERS[recipe.get("sink_only", "every layer")])
    shared |= dict(prefixes=tuple(recipe["prefixes"]), config=recipe["config"])
    if "row" in recipe:
        family = next(family for family in FAMILIES if family.name == recipe["family"])
        return replace(family.attention[recipe["row"]], only=True, **shared)
    plain = ("block", "query", "key", "fused", "gated", "transposed", "norm_over")
    window = WINDOWS[recipe["lookback"]]
    return Attention(
        **{key: recipe[key] for key in plain},
        layers=recipe["layers"],
        heads=HEADS[recipe["heads"]],
        key_heads=KEY_HEADS.get(recipe["key_heads"], recipe["key_heads"]),
        d_model=None,
        d_head=SIZES[recipe["d_head"]],
        input_norm=norm_cell(recipe["input_norm"]),
        key_input_norm=norm_cell(recipe.get("key_input_norm")),
        query_norm=norm_cell(recipe["query_norm"]),
        key_norm=norm_cell(recipe["key_norm"]),
        rotary=rotary_cell(recipe["rotary"]),
        scale=SCALES[recipe["scale"]],
        softcap=recipe["softcap"],
        lookback=window,
        turns_first=recipe.get("turns_first", False),
        lookahead={"causal": 0, "both ways": None, "as far as back": window}[recipe["lookahead"]],
        **shared,
    )
