"""A model's config as untrusted values, and the cells of the tables that are read from it.

A cell is a literal, the name of a config entry, or a function of the config and the layer.
"""

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import Refusal, missing, refusal
from ..records import JsonMapping


class Asked(dict[str, Any]):
    """A table that knows which of its entries were asked for, those of tables within it by their path."""

    def __init__(self, values: JsonMapping, asked: Iterable[str] = (), path: str = "") -> None:
        super().__init__(values)
        self.asked, self.path = asked if isinstance(asked, set) else set(asked), path

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(f"{self.path}{key}")
        value = super().get(key, default)
        return Asked(value, self.asked, f"{self.path}{key}.") if isinstance(value, Mapping) else value

    def __getitem__(self, key: str) -> Any:
        self.asked.add(f"{self.path}{key}")
        return super().__getitem__(key)


@dataclass(frozen=True)
class Config:
    """`config["a|b.c"]` is the first of `a` and `b → c` that is there and not null."""

    values: JsonMapping = field(default_factory=dict)

    def get(self, keys: str, default: object = None) -> Any:
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
            if not self.values:
                remedy = "put the model's config.json next to its weights, or describe the model with --layout"
                raise missing(f"a config.json with {wanted}", remedy)
            remedy = "add it to config.json, or describe the model with --layout"
            raise missing(f"{wanted} in the config", remedy)
        return value

    def anywhere(self, keys: str) -> Any:
        """The one value that the first of these keys has, at the top or in any table of the config; None where none.

        Refused where tables disagree: a config of a whole run may describe several models.
        """
        for key in keys.split("|"):
            tables = [self.values]
            for table in tables:  # grows by the tables within each
                tables += [value for value in table.values() if isinstance(value, Mapping)]
            values = list(dict.fromkeys(table[key] for table in tables if is_number(table.get(key))))
            if len(values) > 1:
                listed = ", ".join(map(str, values[:4]))
                raise refusal(f"one value of `{key}` in the config", listed, "keep one of them")
            if values:
                return values[0]
        return None

    def positive(self, keys: str, default: float | None = None) -> float:
        """An entry that must be a positive number; files write whole ones without a point."""
        value = self[keys] if default is None else self.get(keys, default)
        if not is_number(value) or not value > 0:
            got = reprlib.repr(value)
            raise refusal(f"a positive number for `{keys}` in the config", got, "correct config.json")
        return float(value)

    def numbers(self, keys: str, length: int) -> tuple[float, ...]:
        """Read an entry that must be a list of this many positive numbers."""
        values = self[keys]
        fits = isinstance(values, list | tuple) and len(values) == length
        if not fits or not all(is_number(value) and value > 0 for value in values):
            got = f"{len(values)}: {reprlib.repr(values)}" if isinstance(values, list | tuple) else reprlib.repr(values)
            raise refusal(f"{length} positive numbers for `{keys}` in the config", got, "correct config.json")
        return tuple(map(float, values))

    def within(self, key: str | None) -> "Config":
        """The part of a composite config, such as `text_config`."""
        if key is None:
            return self
        if not isinstance(part := self[key], Mapping):
            raise refusal(f"a table for `{key}` in the config", reprlib.repr(part), "correct config.json")
        return Config(part)


# A cell of a table: a literal, the name of a config entry, or a function of the config and the layer.
Cell = int | float | bool | str | None | Callable[[Config, int], Any]


def ask(function: Callable[..., Any], config: Config, *place: int) -> Any:
    """Call a table's function on a config: untrusted values can fail it in any way."""
    try:
        return function(config, *place)
    except Refusal:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as cause:
        got = f"one that ends in {reprlib.repr(cause)}"
        raise refusal("a config that describes this model", got, "correct config.json") from cause


def resolve(cell: Cell, config: Config, layer: int = 0) -> Any:
    """The value of a cell for one layer."""
    if callable(cell):
        return ask(cell, config, layer)
    return config[cell] if isinstance(cell, str) else cell


def whole_number(cell: Cell, config: Config, what: str, *, layer: int = 0, least: int = 1) -> int:
    """The value of a cell that must be a whole number, by default a positive one."""
    value = resolve(cell, config, layer)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        kind = "positive whole number" if least == 1 else f"whole number of at least {least}"
        raise refusal(f"a {kind} for the {what}", reprlib.repr(value), "correct config.json or use --layout")
    return value


def finite_number(cell: Cell, config: Config, what: str, *, layer: int = 0) -> float:
    """The value of a cell that must be a finite number."""
    value = resolve(cell, config, layer)
    if not is_number(value):
        raise refusal(f"a number for the {what}", reprlib.repr(value), "correct config.json or use --layout")
    return float(value)


def optional_whole_number(cell: Cell, config: Config, what: str, *, layer: int = 0) -> int | None:
    """A whole number from 0 on, or nothing."""
    return None if resolve(cell, config, layer) is None else whole_number(cell, config, what, layer=layer, least=0)


def optional_number(cell: Cell, config: Config, what: str, *, layer: int = 0) -> float | None:
    return None if resolve(cell, config, layer) is None else finite_number(cell, config, what, layer=layer)


def is_number(value: object) -> bool:
    """Finite as a float, too: JSON holds whole numbers of any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def entry(keys: str, default: object) -> Callable[[Config, int], Any]:
    """A cell: the config's entry, or what the family's own config class takes where it is silent."""
    return lambda config, layer: config.get(keys, default)


def anywhere(keys: str) -> Callable[[Config, int], Any]:
    """A cell: the config's entry, wherever in it that stands; asked for where there is none."""
    return lambda config, layer: found if (found := config.anywhere(keys)) is not None else config[keys]


# ------------------------------------------------- scaling of word embeddings before positions are added to them
# Types that multiply embeddings by √d unless their config says otherwise.
SCALED = (
    "bigbird_pegasus", "biogpt", "fsmt", "kosmos_2_text_model", "m2m_100", "nllb-moe", "pegasus_x", "plbart", "xglm",
)  # fmt: skip
# Types whose embeddings pass a norm of their own before the first layer's, which no row of a table reads.
NORMED = ("mbart",)


def embedding_scale(config: Config, d_model: int) -> float | None:
    """Factor of the embeddings where positions are added; None where more than that is done to them.

    >>> embedding_scale(Config({"scale_embedding": True}), 16), embedding_scale(Config({"model_type": "gpt2"}), 16)
    (4.0, 1.0)
    """
    model_type = config.get("model_type")
    if model_type in NORMED:
        return None
    return math.sqrt(d_model) if config.get("scale_embedding", model_type in SCALED) else 1.0
