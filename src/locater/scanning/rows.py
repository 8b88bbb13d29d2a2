"""Row of a scan: the quantities of one head; and conditions on rows, such as `xi<0.5 regime=no-signal`."""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..behaviour import Place, head_name
from ..errors import BadArguments
from ..quantities import REGIMES
from ..records import Json

if TYPE_CHECKING:
    from ..head import Head

ON_REQUEST = ("eigenvalues", "spread")


@dataclass(frozen=True, repr=False)
class HeadRow:
    """The moments of W = W_K^T W_Q, where `variance` may be negative and `spread` may not; `temperature` is λ.

    `spread` and `eigenvalues` are there where eigenvalues were asked for: they take as long as all else.
    `sigma` is the largest singular value of W, `logit_bound` what no logit can exceed (None where nothing bounds it).
    `localisation` and `regime` are of the random-walk theory; what a head does is estimated: the share of its mass on
    keys nearer than 16 in texts of 256 tokens, the first token excluded; None where no estimate holds.
    """

    block: str
    layer: int
    head: int
    key_head: int
    d_model: int
    d_head: int
    temperature: float
    trace: float
    trace_of_square: float
    frobenius_squared: float
    mean: float
    variance: float
    mean_nonzero: float
    variance_nonzero: float
    spread: float | None
    xi: float
    eta: float
    localisation: float
    regime: str
    sigma: float | None = None
    symmetry: float | None = None
    logit_bound: float | None = None
    estimated_near_mass: float | None = None
    estimated_near_mass_interval: tuple[float, float] | None = None
    eigenvalues: tuple[tuple[float, float], ...] | None = None
    curves: dict[str, dict[str, list[float]]] | None = field(default=None, compare=False)

    @property
    def place(self) -> Place:
        return self.block, self.layer, self.head

    def __repr__(self) -> str:
        """Name the head with the numbers that are asked for first: all fields would fill a session."""
        numbers = f"tr W {self.trace:.3g}, η {self.eta:.3g}, ξ {self.xi:.3g}, λ {self.temperature:.3g}"
        return f"HeadRow({head_name(*self.place)}: {numbers}, {self.regime})"

    def to_record(self) -> Json:
        """All columns, for tables; those on request only where they were asked for."""
        record = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "curves"}
        return {name: value for name, value in record.items() if value is not None or not name.startswith(ON_REQUEST)}

    def to_json(self) -> Json:
        """The columns of the schema locater.scan/1, and curves where they were kept."""
        return self.to_record() | (self.curves or {})


def in_order(rows: Sequence[HeadRow]) -> list[HeadRow]:
    """By block, layer and head."""
    from ..head import BLOCKS  # rows are read where torch is not wanted

    by_place = sorted(rows, key=attrgetter("layer", "head"))
    return [row for block in BLOCKS for row in by_place if row.block == block]


def make_rows(heads: "Sequence[Head]", columns: dict[str, list[Any]], *, temperature: float) -> list[HeadRow]:
    """Heads of one shape and their columns, as a row for each."""
    d_head, d_model = heads[0].query.weight.shape
    return [
        HeadRow(
            block=head.block,
            layer=head.layer,
            head=head.index,
            key_head=head.index if head.key_index is None else head.key_index,
            d_model=d_model,
            d_head=d_head,
            temperature=temperature,
            **dict(zip(columns, cells, strict=True)),
        )
        for head, cells in zip(heads, zip(*columns.values(), strict=True), strict=True)
    ]


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


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Conditions separated by whitespace or commas; a row that meets any of them counts.

    >>> [condition.column for condition in parse_conditions("xi<0.5, regime=no-signal")]
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
    from ..head import BLOCKS

    column, sign, value = match.groups()
    words: dict[str, tuple[str, ...]] = {"block": BLOCKS, "regime": REGIMES}
    if column in words:
        if sign not in ("=", "==", "!="):
            raise BadArguments(f"--fail-on compares {column} by = or != only, got {part!r}")
        if value not in words[column]:
            raise BadArguments(f"--fail-on knows {column} as one of {', '.join(words[column])}, got {value!r}")
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
