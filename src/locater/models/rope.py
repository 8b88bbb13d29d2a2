"""From a config's rotary entries, in the old and the new spelling, to a `Rotary`."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from ..errors import refusal
from ..positions import NTK, DynamicNTK, LinearScaling, Llama3, LongRoPE, Proportional, Rotary, Scaling, YaRN
from .config import Config, is_number, optional_whole_number, resolve, whole_number
from .schema import RotaryAt

PLAIN = ("default", "mrope")
FRACTION = "partial_rotary_factor"
BY_ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")  # their own code takes `dynamic` with an alpha for a fixed stretch

# A length that the config leaves out is a number of their classes, whatever the rotary entries say: it must be stated.
OWN_LENGTH = ("phi3", "phi4_multimodal")


def rotary_of(row: RotaryAt | Rotary | None, config: Config, *, layer: int, d_head: int) -> Rotary | None:
    """The rotary positions of one layer, or None where it has none."""
    if isinstance(row, Rotary):
        return row
    if row is None or not resolve(row.only, config, layer):
        return None
    chosen = resolve(row.parameters, config, layer)
    entries = Config(rope_entries(config) if chosen is None else chosen)
    if not isinstance(entries.values, Mapping) or any(isinstance(value, Mapping) for value in entries.values.values()):
        raise refusal("rotary parameters as one table in the config", reprlib.repr(entries.values))
    base = entries.positive("rope_theta", resolve(row.base, config, layer))
    start = whole_number(row.start, config, "first rotated dimension", layer=layer, least=0)
    num_dims = optional_whole_number(row.num_dims, config, "rotated dimensions", layer=layer)
    fraction = _fraction(row, entries, config, layer, num_dims)
    kind = entries.get("rope_type|type", "default")
    if kind == "proportional":  # of the scaling itself, whichever family it is in
        fraction = entries.positive(FRACTION, fraction)
    if num_dims is None:
        num_dims = d_head - start if kind == "proportional" else int((d_head - start) * fraction)
    scaling = None if kind in PLAIN else _scaling(kind, entries, config, num_dims, int(fraction * num_dims // 2))
    return Rotary(base, num_dims, start, bool(resolve(row.interleaved, config, layer)), scaling, row.backward)


def rope_entries(config: Config) -> Any:
    """The table of rotary parameters; where both spellings are there, transformers takes the older."""
    return config.get("rope_scaling") or config.get("rope_parameters", {})


def _fraction(row: RotaryAt, entries: Config, config: Config, layer: int, num_dims: int | None) -> float:
    """Rotated fraction of a head; a family whose code does not ask must not be told, but what its row says already."""
    if row.fraction is not None:
        return entries.positive(FRACTION, resolve(row.fraction, config, layer))
    stated = entries.get(FRACTION, config.get(FRACTION, 1.0))
    size = config.get("head_dim")
    if num_dims is not None and is_number(size) and is_number(stated) and num_dims <= size * stated < num_dims + 1:
        return 1.0  # the row's own number of dimensions in other words, as Mistral 4's configs have it
    if stated != 1 and entries.get("rope_type|type") != "proportional":
        expected = f"no `{FRACTION}` other than 1 in a model whose own code turns whole heads"
        raise refusal(expected, reprlib.repr(stated), "describe the model with --layout, if its heads turn in part")
    return 1.0


def _scaling(kind: object, entries: Config, config: Config, num_dims: int, num_turning: int) -> Scaling:
    """The variant that the config names."""
    longest = "max_position_embeddings"
    match kind:
        case "linear":
            return LinearScaling(entries.positive("factor"))
        case "proportional":
            return Proportional(num_turning, entries.positive("factor", 1.0))
        case "dynamic" if entries.get("alpha") and config.get("model_type") in BY_ALPHA:
            return NTK(entries.positive("alpha"))
        case "dynamic":
            return DynamicNTK(entries.positive("factor"), int(config.positive(longest)))
    is_long = kind in ("longrope", "su") or entries.get("long_factor") is not None
    in_config = config.get(f"original_{longest}") or not entries.get(f"original_{longest}")
    stated = config if in_config or config.get("model_type") in OWN_LENGTH else entries
    original = int(stated.positive(f"original_{longest}" if is_long else f"original_{longest}|{longest}"))
    match kind:
        case "llama3":
            low, high = entries.positive("low_freq_factor"), entries.positive("high_freq_factor")
            return Llama3(entries.positive("factor"), low, high, original)
    factor = entries.positive("factor") if entries.get("factor") else config.positive(longest) / original
    match kind:
        case "yarn" if entries.get("long_factor") is None:
            return _yarn(entries, factor, original)
        case "longrope" | "su" | "yarn":  # early Phi-3 files say su, or yarn with factors per pair
            return _longrope(entries, factor, original, num_dims // 2)
    raise refusal("a known kind of rotary scaling", reprlib.repr(kind), "describe the model with --layout")


def _longrope(entries: Config, factor: float, original: int, pairs: int) -> LongRoPE:
    natural = math.sqrt(1 + math.log(factor) / math.log(max(original, 2))) if factor > 1 else 1.0
    short, long = (entries.numbers(f"{name}_factor", pairs) for name in ("short", "long"))
    return LongRoPE(short, long, original, entries.positive("attention_factor", natural))


def _yarn(entries: Config, factor: float, original: int) -> YaRN:
    both = bool(entries.get("mscale") and entries.get("mscale_all_dim"))
    alone, every = (entries.positive(name) if both else 1.0 for name in ("mscale", "mscale_all_dim"))
    natural = yarn_mscale(factor, alone) / yarn_mscale(factor, every) if both else yarn_mscale(factor)
    fast, slow = entries.positive("beta_fast", 32.0), entries.positive("beta_slow", 1.0)
    amplitude = entries.positive("attention_factor", natural)
    return YaRN(factor, original, fast, slow, amplitude, bool(entries.values.get("truncate", True)))


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of the logit's temperature for a context `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
