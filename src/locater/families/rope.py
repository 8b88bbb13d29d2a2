"""From a config's rotary entries, in the old and the new spelling, to a `Rotary`."""

import math
from collections.abc import Mapping

from ..errors import refuse
from ..positions import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Rotary, Scaling, YaRN
from .config import Config, resolve
from .schema import RotaryAt

PLAIN = ("default", "mrope")


def rotary_of(row: RotaryAt | None, config: Config, *, layer: int, d_head: int) -> Rotary | None:
    """The rotary positions of one layer, or None where it has none."""
    if row is None or not resolve(row.only, config, layer):
        return None
    chosen = resolve(row.parameters, config, layer)
    entries = Config(config.get("rope_parameters|rope_scaling", {}) if chosen is None else chosen)
    if not isinstance(entries.values, Mapping):
        raise refuse("rotary parameters as a table in the config", repr(entries.values))
    base = entries.get("rope_theta") or resolve(row.base, config, layer)
    fraction = entries.get("partial_rotary_factor") or resolve(row.fraction, config, layer)
    start, num_dims = resolve(row.start, config, layer), resolve(row.num_dims, config, layer)
    kind = entries.get("rope_type|type", "default")
    if num_dims is None:
        num_dims = d_head - start if kind == "proportional" else int((d_head - start) * fraction)
    scaling = None if kind in PLAIN else _scaling(kind, entries, config, int(fraction * num_dims // 2))
    return Rotary(float(base), num_dims, start, bool(resolve(row.interleaved, config, layer)), scaling)


def _scaling(kind: str, entries: Config, config: Config, num_turning: int) -> Scaling:
    """The variant that the config names."""
    longest = "max_position_embeddings"
    match kind:
        case "linear":
            return Linear(entries["factor"])
        case "proportional":
            return Proportional(num_turning, entries.get("factor", 1.0))
        case "dynamic":
            return DynamicNTK(entries["factor"], config[longest])
    original = config.get(f"original_{longest}") or entries.get(f"original_{longest}") or config[longest]
    match kind:
        case "llama3":
            return Llama3(entries["factor"], entries["low_freq_factor"], entries["high_freq_factor"], original)
        case "yarn":
            return _yarn(entries, entries.get("factor") or config[longest] / original, original)
        case "longrope" | "su":
            return _longrope(entries, entries.get("factor") or config[longest] / original, original)
    raise refuse("a known kind of rotary scaling", repr(kind), "describe the model with --layout")


def _longrope(entries: Config, factor: float, original: int) -> LongRoPE:
    amplitude = entries.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRoPE(tuple(entries["short_factor"]), tuple(entries["long_factor"]), original, amplitude)


def _yarn(entries: Config, factor: float, original: int) -> YaRN:
    amplitude = entries.get("attention_factor")
    if amplitude is None:
        alone, every = entries.get("mscale"), entries.get("mscale_all_dim")
        both = bool(alone and every)
        amplitude = yarn_mscale(factor, alone) / yarn_mscale(factor, every) if both else yarn_mscale(factor)
    fast, slow = entries.get("beta_fast", 32), entries.get("beta_slow", 1)
    return YaRN(factor, original, fast, slow, amplitude, entries.get("truncate", True))


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of the logit's temperature for a context `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
