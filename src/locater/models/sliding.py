"""Layers with a sliding window, and its reach."""

from collections.abc import Callable
from typing import Any

from ..errors import refusal
from .schema import Config, ahead, count

Rule = Callable[[Config, int], bool]  # whether a layer slides


def every_layer(config: Config, layer: int) -> bool:
    return True


def typed(rule: Rule) -> Rule:
    """`layer_types` where the config has it, the older rule where not."""

    def slides(config: Config, layer: int) -> bool:
        types = config.get("layer_types")
        return rule(config, layer) if types is None else types[layer] == "sliding_attention"

    return slides


def all_but_every(period: int, *, stated: str | None = "sliding_window_pattern") -> Rule:
    """Every `period`-th layer sees all, the others slide; the entry `stated` may hold another period."""

    def slides(config: Config, layer: int) -> bool:
        return (layer + 1) % (config.get(stated, period) if stated else period) != 0

    return typed(slides)


def window(slides: Rule, *, default: int | None = None, switch: str | None = None) -> Callable[[Config, int], Any]:
    """A window of w admits distances up to w − 1.

    A null `sliding_window` means none, unlike a missing one; `switch` names an entry that must be true besides.
    """

    def lookback(config: Config, layer: int) -> int | None:
        size = config.values.get("sliding_window", default)
        if size is None or (switch is not None and not config.get(switch, False)) or not slides(config, layer):
            return None
        if ahead(config, layer) is None:
            raise refusal("a causal model", "a window that looks both ways", "describe the model with --layout")
        return count(size if isinstance(size, int) else lambda *_: size, config, "`sliding_window`") - 1

    return lookback
