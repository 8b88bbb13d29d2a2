"""Coverage of a scan: the one definition of COMPLETE, and all that keeps a model from it.

COMPLETE means that every tensor and setting that can change a logit was read and used, and that nothing else in the
module acts. Otherwise it says what differs or is left out (PARTIAL), or by what the heads were read without
being run (`by the table, not run`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from .biases import lost_norm, misplaced_bias
from .code import foreign_code
from .neighbours import Surroundings, missing_layers, uneven_layers, unknown_neighbours, unread_queries
from .places import Places
from .schema import Config, Family, ask
from .settings import unread_settings

BY_TABLE, BY_LAYOUT = "by the table, not run", "by the layout, not run"


@dataclass(frozen=True)
class Coverage:
    """`reasons` say what is left out or differs; `basis` by what the heads were read, where nothing has proven them."""

    num_read: int
    num_all: int
    what: str = "layers"
    reasons: tuple[str, ...] = ()
    basis: str = ""
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The line that a scan shows.

        >>> str(Coverage(2, 2)), str(Coverage(2, 2, basis=BY_TABLE)), str(Coverage(1, 2, reasons=("no keys in 1",)))
        ('COMPLETE', 'by the table, not run', 'PARTIAL: 1 of 2 layers, no keys in 1')
        """
        if not self.reasons:
            return ", ".join([self.basis or "COMPLETE", *self.remarks])
        read = f"PARTIAL: {self.num_read} of {self.num_all} {self.what}"
        return ", ".join([read, *self.reasons, *([self.basis] if self.basis else []), *self.remarks])

    @property
    def is_complete(self) -> bool:
        return not self.reasons and not self.basis

    def without(self, reasons: Iterable[str]) -> "Coverage":
        """The same with further reasons why it is not complete."""
        return replace(self, reasons=(*self.reasons, *reasons))


def coverage_of(
    family: Family, config: Config, places: tuple[Places, ...], *, proven: Config | None = None
) -> Coverage:
    """Compute coverage of tensors and settings by a family's rows: what is stored against what the rows read.

    `proven`: the config with all defaults of a twin that has all settings, so that none of them can be unread.
    """
    partial = ask(family.partial, proven or config) if family.partial else None
    reasons = [reason for at in places for reason in _missing(at)] + ([partial] if partial else [])
    reasons += [reason for at in places if (reason := uneven_layers(at))]
    checks = (misplaced_bias, lost_norm) if family.model_types else ()  # rows of known code say which biases there are
    reasons += [reason for at in places for check in checks if (reason := check(at))]
    reasons += () if partial else _beside(places)
    if unread := [] if proven else unread_settings(family, config, places):
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        reasons.append(f"not read in the config: `{unread[0][:120]}`{more}")
    reasons += foreign_code(config, family)
    num_read, num_all = sum(len(at.layers) for at in places), sum(at.num_layers for at in places)
    return Coverage(num_read, num_all, reasons=tuple(reasons))


def _beside(places: tuple[Places, ...]) -> Iterator[str]:
    """Tensors that no row reads."""
    around, tensors = Surroundings.of(places), places[0].tensors
    if unknown := unknown_neighbours(around, tensors):
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        yield f"not in the heads: `{unknown[0][:120]}`{more}"
    if unread := unread_queries(around, tensors.names):
        yield f"{len(unread)} further tensors that look like queries, such as `{unread[0][:120]}`"


def _missing(places: Places) -> Iterator[str]:
    without, absent, beyond = missing_layers(places)
    if without:
        yield f"no queries and keys in {places.row.block} layers {spans(without)}"
    if absent:
        yield f"{places.row.block} layers {spans(absent)} are not in the file"
    if beyond:
        yield f"{places.row.block} layers {spans(beyond)} of the file are not in the config"


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers as a reader would list them.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
