"""`--layout FILE.yaml`: a table row written by the user, with the same columns as the built-in ones."""

import reprlib
from dataclasses import MISSING, fields
from os import PathLike
from pathlib import Path
from string import Formatter
from typing import Any

from ..documents import read_yaml
from ..errors import missing, refusal, within
from ..head import BLOCKS
from .schema import Attention, BucketsAt, Family, LowRankAt, NormAt, RotaryAt

# Columns that hold a row of their own; the rest are numbers, words or names of config entries.
NESTED: dict[str, type] = {
    "input_norm": NormAt,
    "key_input_norm": NormAt,
    "query_norm": NormAt,
    "key_norm": NormAt,
    "norm": NormAt,
    "query_low_rank": LowRankAt,
    "key_low_rank": LowRankAt,
    "rotary": RotaryAt,
    "buckets": BucketsAt,
}
NOT_IN_FILES = ("names", "alibi")  # columns that only code can fill
# Columns that name modules, and what such a name may leave open.
PATTERNS = ("query", "key", "name", "down", "up")
PLACEHOLDERS = ("layer", "previous", "head")
WORDS: dict[str, tuple[object, ...]] = {
    "fused": (None, "qkv", "grouped", "codegen"),
    "kind": ("layer", "rms", "l2"),
    "bare": (None, "layer", "rms"),
    "norm_over": ("head", "projection"),
}
FLAGS = {column.name for kind in (Attention, *NESTED.values()) for column in fields(kind) if column.type is bool}
EXAMPLE = "attention: [{block: decoder, query: 'layers.{layer}.wq', key: 'layers.{layer}.wk', layers: 2, heads: 4}]"


def read_layout(path: str | PathLike[str]) -> Family:
    """The family that a layout file describes; whatever it does not say stands as in `Attention`."""
    with within(str(path)):
        document = read_yaml(Path(path))
        if not isinstance(document, dict) or not isinstance(document.get("attention"), list):
            raise refusal("a list `attention` of blocks", type(document).__name__, f"for example: {EXAMPLE}")
        rows = tuple(_row(Attention, entry, f"attention[{n}]") for n, entry in enumerate(document["attention"]))
        if not rows or any(row.block not in BLOCKS for row in rows):
            raise refusal("blocks among " + ", ".join(BLOCKS), reprlib.repr([row.block for row in rows]))
        return Family(str(document.get("family", "layout")), (), rows)


def _row(kind: type, entry: object, place: str) -> Any:
    """One row of the given kind, refusing columns that it does not have."""
    columns = {field.name: field for field in fields(kind) if field.name not in NOT_IN_FILES}
    if not isinstance(entry, dict):
        raise refusal(f"a table at {place}", reprlib.repr(entry))
    if unknown := set(entry) - set(columns):
        raise refusal(f"columns of {place} among {', '.join(columns)}", ", ".join(map(str, sorted(unknown, key=str))))
    needed = [name for name, field in columns.items() if field.default is MISSING and name not in entry]
    if needed:
        raise missing(f"{', '.join(needed)} in {place}")
    return kind(**{name: _cell(name, value, f"{place}.{name}") for name, value in entry.items()})


def _cell(name: str, value: object, place: str) -> Any:
    if name in NESTED and value is not None:
        return _row(NESTED[name], value, place)
    if name == "prefixes" and isinstance(value, list):
        return tuple(map(str, value))
    if not isinstance(value, str | int | float | bool | None):
        raise refusal(f"a number, a word or the name of a config entry at {place}", reprlib.repr(value))
    if name in PATTERNS or (name in ("first", "sink") and value is not None):
        _check_pattern(value, place)
    return _checked(name, value, place)


def _check_pattern(value: object, place: str) -> None:
    """A name with {layer}, {previous} or {head} in it, and no other way of formatting: one can ask for any length."""
    try:
        fields = [part for part in Formatter().parse(value) if part[1] is not None] if isinstance(value, str) else None
    except ValueError:
        fields = None
    if fields is None or any(part[1] not in PLACEHOLDERS or part[2] or part[3] for part in fields):
        raise refusal(f"the name of a module with {{layer}} in it at {place}", reprlib.repr(value))


def _checked(name: str, value: object, place: str) -> object:
    """A word among those that a column knows, a yes or no where one is asked for."""
    if name in WORDS and value not in WORDS[name]:
        raise refusal(f"one of {', '.join(map(str, WORDS[name]))} at {place}", reprlib.repr(value))
    if name in FLAGS and not isinstance(value, bool):
        raise refusal(f"true or false at {place}", reprlib.repr(value))
    if name == "prefixes" and value is not None:
        raise refusal(f"a list of prefixes at {place}", reprlib.repr(value))
    if name == "config" and not isinstance(value, str | None):
        raise refusal(f"the name of a part of the config at {place}", reprlib.repr(value))
    return value
