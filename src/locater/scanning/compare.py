"""`compare`: how every head moved between checkpoints, or along a training run."""

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING

from ..behaviour import Place, head_name
from ..budget import limited
from ..checkpoints.sharded import OTHER, WEIGHTS
from ..errors import counted, net, refusal
from ..models.sources import Stored
from ..records import Json, data_frame
from ..report.shown import Shown
from . import DEFAULT_LENGTH
from .rows import HeadRow
from .scan import Scan, scan

if TYPE_CHECKING:
    import pandas

MOST_TOLD = 3  # heads in a summary


@dataclass(frozen=True)
class Movement:
    """One head along the checkpoints: its rows, and how far its spectrum went from first to last.

    `moved` is the length of (Δ tr W, Δη) over η of the first: 0 for an unchanged spectrum, about 1 for a head that is
    another one; `path` adds up the steps between.
    """

    block: str
    layer: int
    head: int
    rows: tuple[HeadRow, ...]

    @property
    def moved(self) -> float:
        """Distance of (tr W, η) from the first checkpoint to the last, over the first η."""
        return _distance(self.rows[0], self.rows[-1], unit=self.rows[0].eta)

    @property
    def path(self) -> float:
        """Length of the way of (tr W, η) through all checkpoints, over the first η."""
        return sum(_distance(before, after, unit=self.rows[0].eta) for before, after in pairwise(self.rows))

    def to_json(self) -> Json:
        columns = ("trace", "eta", "xi", "localisation", "regime")
        return {
            "block": self.block,
            "layer": self.layer,
            "head": self.head,
            "moved": self.moved,
            "path": self.path,
            **{column: [getattr(row, column) for row in self.rows] for column in columns},
        }

    def to_record(self) -> Json:
        """One row of a table: `xi_1`, `xi_2` … are those of the checkpoints in their order."""
        document = self.to_json()
        numbered = {f"{name}_{n}": value for name, many in document.items() if isinstance(many, list)
                    for n, value in enumerate(many, start=1)}  # fmt: skip
        return {name: value for name, value in document.items() if not isinstance(value, list)} | numbered


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """The scans compared, in order, and the movement of each head that all of them have."""

    scans: tuple[Scan, ...]
    heads: tuple[Movement, ...]

    @property
    def refused(self) -> tuple[str, ...]:
        """Heads that could not be read in one of them, and are not followed: damaged or diverged, not unmoved."""
        return tuple(f"{one.source}: {sentence}" for one in self.scans for sentence in one.refused)

    @property
    def names(self) -> list[str]:
        """Names of the models side by side: the ends of their paths, as long as needed to be different."""
        return shortest_names([one.source for one in self.scans])

    def to_frame(self) -> "pandas.DataFrame":
        """A pandas DataFrame, a row per head."""
        return data_frame([movement.to_record() for movement in self.heads])

    def most_moved(self, count: int) -> list[Movement]:
        return sorted(self.heads, key=lambda movement: -movement.moved)[:count]

    def summary(self) -> str:
        """Count the heads that were followed, and name those that went furthest."""
        furthest = ", ".join(
            f"{head_name(*one.rows[0].place)} ({one.moved:.2f})" for one in self.most_moved(MOST_TOLD) if one.moved
        )
        told = f"{' → '.join(self.names)}: {counted(len(self.heads), 'head')}, furthest moved: {furthest or 'none'}"
        return "\n".join([told, *(f"not read: {sentence}" for sentence in self.refused)])

    def to_json(self) -> Json:
        return {
            "schema": "locater.compare/1",
            "sources": [one.source for one in self.scans],
            "family": self.scans[0].family,
            "coverage": [one.coverage for one in self.scans],
            **({"refused": list(self.refused)} if self.refused else {}),
            "heads": [movement.to_json() for movement in self.heads],
        }


def compare(
    sources: Iterable[str | Path | Stored],
    *,
    layers: Iterable[int] | None = None,
    length: int = DEFAULT_LENGTH,
    raw: bool = False,
    jobs: int = 1,
    timeout: float | None = None,
) -> Comparison:
    """Scan every source (a run's folder stands for its checkpoints, by step) and follow each head through them.

    `jobs` processes scan several at once. `timeout` is the number of seconds for all files from elsewhere, or for those
    of each scan where there are several processes.
    """
    stored = [source if isinstance(source, Stored) else Stored(source) for source in sources]
    names = " ".join(source.name for source in stored)
    with net(names):
        expanded = [replace(one, place=place) for one in stored for place in checkpoints_in(fspath(one.place))]
    if len(expanded) < 2:
        got = [fspath(one.place) for one in expanded] or "none"
        raise refusal("at least two checkpoints", got, "name another, or a folder with several")
    if timeout is not None:
        expanded = [replace(one, timeout=timeout) for one in expanded]
    one_scan = partial(scan, layers=None if layers is None else list(layers), length=length, raw=raw)
    with limited(seconds=timeout):
        scans = [*map(one_scan, expanded)] if jobs == 1 else _map_over_processes(jobs, one_scan, expanded)
    with net(names):
        return follow(scans)


def follow(scans: Sequence[Scan]) -> Comparison:
    """Match the heads of all scans by block, layer and number; refuses models of different shape."""
    tables: list[dict[Place, HeadRow]] = [{row.place: row for row in one.heads} for one in scans]
    common = [key for key in tables[0] if all(key in table for table in tables)]
    shapes = {(row.d_model, row.d_head) for table in tables for row in table.values()}
    if not common or len({frozenset((r.d_model, r.d_head) for r in table.values()) for table in tables}) > 1:
        raise refusal("models of one shape", " and ".join(f"{d}×{h}" for d, h in sorted(shapes)))
    return Comparison(tuple(scans), tuple(Movement(*key, tuple(table[key] for table in tables)) for key in common))


def shortest_names(sources: Sequence[str]) -> list[str]:
    """Shorten the sources to their last parts, or as many parts for all as tell them apart.

    >>> shortest_names(["runs/a/model", "runs/b/model"])
    ['a/model', 'b/model']
    """
    parts = [[part for part in re.split(r"[/\\]", source) if part] or [source] for source in sources]
    names = list(sources)
    for count in range(max(map(len, parts)), 0, -1):
        shorter = ["/".join(part[-count:]) for part in parts]
        if len(set(shorter)) < len(set(sources)):
            break
        names = shorter
    return names


def checkpoints_in(source: str | Path) -> list[str]:
    """The source itself, or, for a run's folder, the checkpoints in it sorted by the last number of their names."""
    folder = Path(source)
    if not folder.is_dir() or (folder / "config.json").exists():
        return [str(source)]
    numbered = [(re.findall(r"\d+", entry.name), entry) for entry in folder.iterdir() if not entry.name.startswith(".")]
    steps = [(int(numbers[-1]), entry) for numbers, entry in numbered if numbers and _holds_weights(entry)]
    return [str(entry) for _, entry in sorted(steps)] if len(steps) > 1 else [str(source)]


def _holds_weights(entry: Path) -> bool:
    if entry.is_dir():
        return (entry / "config.json").exists() or (entry / ".metadata").exists()
    sharded = re.search(r"-\d+-of-\d+\.", entry.name)
    return entry.suffix in WEIGHTS and not sharded and not OTHER.match(entry.name)


def _map_over_processes(jobs: int, one_scan: Callable[[Stored], Scan], sources: Sequence[Stored]) -> list[Scan]:
    """Several at a time, each with its own memory."""
    import multiprocessing

    # Forking a process that has started torch's threads may hang; a fresh one never does.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(one_scan, sources))


def _distance(before: HeadRow, after: HeadRow, *, unit: float) -> float:
    length = ((after.trace - before.trace) ** 2 + (after.eta - before.eta) ** 2) ** 0.5
    return length / unit if unit > 0 else length
