"""`--layout FILE.yaml`: a table row written by the user, with the same columns as the built-in ones."""

from dataclasses import MISSING, fields
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import refusal, within
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
EXAMPLE = "attention: [{block: decoder, query: 'layers.{layer}.wq', key: 'layers.{layer}.wk', layers: 2, heads: 4}]"


def read_layout(path: str | PathLike[str]) -> Family:
    """The family that a layout file describes; whatever it does not say stands as in `Attention`."""
    import yaml

    with within(str(path)):
        try:
            document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as reason:
            raise refusal("a readable YAML file", str(reason).replace("\n", " ")) from None
        if not isinstance(document, dict) or not isinstance(document.get("attention"), list):
            raise refusal("a list `attention` of blocks", type(document).__name__, f"for example: {EXAMPLE}")
        rows = tuple(_row(Attention, entry, f"attention[{n}]") for n, entry in enumerate(document["attention"]))
        if not rows or any(row.block not in BLOCKS for row in rows):
            raise refusal("blocks among " + ", ".join(BLOCKS), [row.block for row in rows])
        return Family(str(document.get("family", "layout")), (), rows)


def _row(kind: type, entry: object, place: str) -> Any:
    """One row of the given kind, refusing columns that it does not have."""
    columns = {field.name: field for field in fields(kind) if field.name not in NOT_IN_FILES}
    if not isinstance(entry, dict):
        raise refusal(f"a table at {place}", repr(entry))
    if unknown := set(entry) - set(columns):
        raise refusal(f"columns of {place} among {', '.join(columns)}", ", ".join(map(str, sorted(unknown, key=str))))
    needed = [name for name, field in columns.items() if field.default is MISSING and name not in entry]
    if needed:
        raise refusal(f"{', '.join(needed)} in {place}", "none")
    return kind(**{name: _cell(name, value, f"{place}.{name}") for name, value in entry.items()})


def _cell(name: str, value: object, place: str) -> Any:
    if name in NESTED and value is not None:
        return _row(NESTED[name], value, place)
    if name == "prefixes" and isinstance(value, list):
        return tuple(map(str, value))
    if not isinstance(value, str | int | float | bool | None):
        raise refusal(f"a number, a word or the name of a config entry at {place}", repr(value))
    return value
