"""Conditions on rows, such as `xi<0.5 regime=no-signal`, for use in continuous integration."""

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from ..errors import BadArguments
from ..head import BLOCKS
from ..quantities import REGIMES
from .rows import HeadRow

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
NOT_COMPARED = ("eigenvalues", "curves", "estimated_near_mass_interval")
WORDS: dict[str, tuple[str, ...]] = {"block": BLOCKS, "regime": REGIMES}
COLUMNS = {field.name: field.type for field in fields(HeadRow) if field.name not in NOT_COMPARED}


@dataclass(frozen=True)
class Condition:
    """column, comparison, value."""

    text: str
    column: str
    compare: Callable[[Any, Any], bool]
    value: float | str

    def met_by(self, row: HeadRow) -> bool:
        """Tell whether the row's value compares so; a value that is not known meets no condition."""
        value = getattr(row, self.column)
        return value is not None and self.compare(value, self.value)


def parse(text: str) -> tuple[Condition, ...]:
    """Conditions separated by whitespace or commas; a row that meets any of them counts.

    >>> [condition.column for condition in parse("xi<0.5, regime=no-signal")]
    ['xi', 'regime']
    """
    conditions = tuple(_parse_one(part) for part in re.split(r"[\s,]+", text.strip()) if part)
    if not conditions:
        raise BadArguments("--fail-on expects conditions such as 'xi<0.5 regime=no-signal', got nothing")
    return conditions


def _parse_one(part: str) -> Condition:
    match = re.fullmatch(r"(\w+)(<=|>=|==|!=|<|>|=)(.+)", part)
    if match is None or match[1] not in COLUMNS:
        raise BadArguments(f"--fail-on expects a column ({', '.join(COLUMNS)}), <, >, =, != and a value, got {part!r}")
    column, sign, value = match.groups()
    if column in WORDS:
        if sign not in ("=", "==", "!="):
            raise BadArguments(f"--fail-on compares {column} by = or != only, got {part!r}")
        if value not in WORDS[column]:
            raise BadArguments(f"--fail-on knows {column} as one of {', '.join(WORDS[column])}, got {value!r}")
        return Condition(part, column, OPERATORS[sign], value)
    try:
        return Condition(part, column, OPERATORS[sign], float(value))
    except ValueError:
        raise BadArguments(f"--fail-on expects a number after {column}{sign}, got {value!r}") from None


def failures(conditions: Iterable[Condition], rows: Iterable[HeadRow]) -> dict[Condition, list[HeadRow]]:
    """The rows that meet each condition; conditions that none meets are left out."""
    rows = list(rows)
    met = {condition: [row for row in rows if condition.met_by(row)] for condition in conditions}
    return {condition: those for condition, those in met.items() if those}
