"""A model's config as the tables read it: alternatives, dotted paths, and a refusal that names what is missing."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import refusal


@dataclass(frozen=True)
class Config:
    """`config["a|b.c"]` is the first of `a` and `b → c` that is there and not null."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def get(self, keys: str, default: Any = None) -> Any:
        for key in keys.split("|"):
            value: Any = self.values
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return default

    def __getitem__(self, keys: str) -> Any:
        if (value := self.get(keys)) is None:
            wanted = " or ".join(f"`{key}`" for key in keys.split("|"))
            raise refusal(
                f"{wanted} in the config", "none", "add it to config.json, or describe the model with --layout"
            )
        return value

    def positive(self, keys: str, default: float | None = None) -> float:
        """An entry that must be a positive number; files write whole ones without a point."""
        value = self[keys] if default is None else self.get(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise refusal(f"a positive number for `{keys}` in the config", repr(value), "mend config.json")
        return float(value)

    def within(self, key: str | None) -> "Config":
        """The part of a composite config, such as `text_config`."""
        return self if key is None else Config(self[key])


# A cell of a table: a literal, the name of a config entry, or a function of the config and the layer.
Cell = int | float | bool | str | None | Callable[[Config, int], Any]


def optional(keys: str, default: Any) -> Callable[[Config, int], Any]:
    """A cell for an entry that files may leave out."""
    return lambda config, layer: config.get(keys, default)


def resolve(cell: Cell, config: Config, layer: int = 0) -> Any:
    """The value of a cell for one layer."""
    if callable(cell):
        try:
            return cell(config, layer)
        except (LookupError, TypeError, AttributeError, ArithmeticError) as cause:
            raise refusal(
                "a config that describes this model", f"one that ends in {cause!r}", "mend config.json"
            ) from cause
    return config[cell] if isinstance(cell, str) else cell


def count(cell: Cell, config: Config, what: str) -> int:
    """The value of a cell that must be a positive whole number."""
    value = resolve(cell, config)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refusal(f"a positive whole number for the {what}", repr(value), "mend config.json or use --layout")
    return value


def entry(keys: str, default: Any) -> Callable[[Config, int], Any]:
    """A cell: the config's entry, or what the family's own config class takes where it is silent."""
    return lambda config, layer: config.get(keys, default)
