"""The folder of a sweep: `sweep.json` lists the points, `rows/` has a file for each that is done.

Workers share nothing but the folder, so every engine leaves the same rows. A row is written whole or not at all; a
worker holds a lock on the point that it measures, and one that dies, however it does, lets go of it.
"""

import hashlib
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locater.errors import Refusal, refusal
from locater.records import Json, check_beside, read_json, write_json

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

Point = Json  # what is to be measured, as JSON
Row = Json  # the point, what came of it under `result`, or what went wrong under `error`
Tell = Callable[[int, int], None]  # how many rows there are, and of how many
Measure = Callable[[Point, Path], object]  # the folder is the point's own, and survives a worker that dies
LIST, ROWS, RUNS = "sweep.json", "rows", "runs"
# A point whose worker died this often is a failure: a model that fills the memory would go on killing them.
MOST_DEATHS = 3


@dataclass(frozen=True)
class Sweep:
    """A folder with its points; `kind` says by what they are measured."""

    folder: Path
    kind: str
    points: tuple[Point, ...]

    def rows(self) -> list[Row]:
        """List the finished rows, in the order of the points."""
        return [self.row(point) for point in self.points if self.path(point).exists()]

    def missing(self) -> list[int]:
        return [number for number, point in enumerate(self.points) if not self.path(point).exists()]

    def work(self, measure: Measure, *, only: Sequence[int] | None = None, stop: Callable[[], bool] = bool) -> int:
        """Measure every point that is neither done nor in another's hands; how many were."""
        done = 0
        for number, point in enumerate(self.points):
            if stop():
                break
            if only is not None and number not in only:
                continue
            with _lock(self.folder / RUNS / f"{key(point)}.lock") as mine:
                if mine and not self.path(point).exists():
                    self._measure(point, measure)
                    done += 1
        return done

    def retry(self) -> int:
        """Forget failures, so that they are measured again; how many there were."""
        failed = [row for row in self.rows() if "error" in row]
        for row in failed:
            self.path(row["point"]).unlink()
            self._deaths(row["point"]).unlink(missing_ok=True)
        return len(failed)

    def _measure(self, point: Point, measure: Measure) -> None:
        """A row in any case: what came out, what was raised, or that workers kept dying of it."""
        place, deaths = self.place(point), self._deaths(point)
        count = deaths.stat().st_size if deaths.exists() else 0  # a letter for each
        if count >= MOST_DEATHS:
            row: Row = {"point": point, "error": f"the process that measured it died {count} times"}
        else:
            # Written before and taken back after: what remains counts the workers that did not get to the end.
            deaths.write_text("x" * (count + 1))
            place.mkdir(parents=True, exist_ok=True)
            try:
                row = {"point": point, "result": measure(point, place)}
            except Exception as reason:
                row = {"point": point, "error": _said(reason)}
            except BaseException:  # interrupted: do not count as a crash
                deaths.unlink()
                raise
        write_json(row, self.path(point))
        deaths.unlink(missing_ok=True)

    def path(self, point: Point) -> Path:
        """Path of the point's row, present or future."""
        return self.folder / ROWS / f"{key(point)}.json"

    def place(self, point: Point) -> Path:
        """Its own folder."""
        return self.folder / RUNS / _name(point)

    def row(self, point: Point) -> Row:
        """Read the row of a point; refuses a row that is another's, or that says neither result nor error."""
        row = read_json(self.path(point))
        if row.get("point") != point or isinstance(row.get("error"), str) == ("result" in row):
            expected = f"the result or the error of its point in {self.path(point)}"
            raise refusal(expected, f"{row!s:.80}", "remove the file to measure it again")
        return row

    def _deaths(self, point: Point) -> Path:
        return self.folder / RUNS / f"{key(point)}.begun"


def _said(reason: Exception) -> str:
    if isinstance(reason, Refusal):
        return str(reason)
    where = traceback.extract_tb(reason.__traceback__)[-1]
    return f"{type(reason).__name__}: {reason} ({Path(where.filename).name}:{where.lineno})"[:500]


def key(point: Point) -> str:
    """A name for a point that depends on its content only."""
    return hashlib.sha256(json.dumps(point, sort_keys=True).encode()).hexdigest()[:16]


def create(folder: Path, kind: str, points: Sequence[Point]) -> Sweep:
    """A new sweep, or the one that is there if it has the same points: then it goes on."""
    points = _checked(json.loads(json.dumps(list(points))), folder / LIST)  # as they will be read back
    if (folder / LIST).exists():
        there = open_sweep(folder)
        if (there.kind, there.points) != (kind, points):
            raise refusal(f"the points that {folder} was begun with", "others", "choose another --out")
    else:
        # What a process that was killed here left behind begins with a dot.
        if folder.exists() and any(not entry.name.startswith(".") for entry in folder.iterdir()):
            raise refusal("a new or empty folder for the sweep", folder, "choose another --out")
        write_json({"schema": "locater.sweep/1", "kind": kind, "points": list(points)}, folder / LIST)
    for part in (ROWS, RUNS):
        (folder / part).mkdir(parents=True, exist_ok=True)
    return Sweep(folder, kind, points)


def open_sweep(folder: Path) -> Sweep:
    """The sweep in a folder."""
    path = folder / LIST
    try:
        document = read_json(path)
    except Refusal as reason:
        raise refusal(
            f"the folder of a sweep, with {LIST}", f"{folder} ({reason!s:.200})", "make one with --out"
        ) from None
    kind, points = document.get("kind"), document.get("points")
    if not isinstance(kind, str) or not isinstance(points, list):
        raise refusal(f"a kind and points in {path}", f"{document!s:.80}", "restore it")
    return Sweep(folder, kind, _checked(points, path))


def _checked(points: list[Any], path: Path) -> tuple[Point, ...]:
    """The points, if each is an object with a folder of its own inside the sweep's."""
    names = set()
    for point in points:
        if not isinstance(point, dict):
            raise refusal(f"points with names and values in {path}", f"{point!r:.80}", "restore it")
        names.add(check_beside(_name(point), path).casefold())
    if len(names) < len(points):
        raise refusal(f"another name for each point in {path}", "one name twice", "vary the options by other values")
    return tuple(points)


def _name(point: Point) -> Any:
    return point.get("name", key(point))


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Try to take the lock; it ends with the block, or with the process."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True
    finally:
        os.close(handle)
