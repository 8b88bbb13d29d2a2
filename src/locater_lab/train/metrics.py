"""Metrics as they arise: a line of JSON each, TensorBoard beside it on request, and a bar on a terminal."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from locater.errors import failed, missing, refusal
from locater.records import Json, JsonMapping, as_written, head_key, layer_key, read_lines, write

from .checksums import UNVERIFIED

METRICS = "metrics.jsonl"
Row = Json
NOTHING: JsonMapping = {}


def read_metrics(path: Path) -> list[Row]:
    """The whole lines of a file of metrics; what a killed process left of a last one is dropped."""
    if not path.exists():
        return []
    return read_lines(path, constant=float)


def rows_of_run(folder: Path) -> list[Row]:
    """The metrics of a run that is to go on."""
    path = folder / METRICS
    with as_written(path):
        return [row for row in read_metrics(path) if row["kind"] and row["step"] >= 0 and _line(row)]


class Metrics:
    """`metrics.jsonl` of a run, continued from a step; a process that is not the first writes nothing."""

    def __init__(
        self, folder: Path, *, step: int, tensorboard: bool, is_first: bool, kept: JsonMapping = NOTHING
    ) -> None:
        """`kept` is what the checkpoint of that step knows of the lines before it."""
        self.file = self.board = None
        self.hash, self.num_lines = hashlib.blake2b(), 0
        if not is_first:
            return
        path = folder / METRICS
        rows = [row for row in rows_of_run(folder) if row["step"] <= step]
        first = rows[: kept.get("lines", len(rows))]
        lines = [self._count(row) for row in first]
        if kept and self.state().items() - kept.items():
            raise refusal(f"the lines up to the last checkpoint in {path}", "others", UNVERIFIED)
        if kept.get("midway", True):  # lines of that step were written behind the checkpoint
            lines += [self._count(row) for row in rows[len(first) :] if row["step"] == step]
        self.board = _board(folder, step) if tensorboard else None
        write(path, lambda temporary: temporary.write_text("".join(lines), encoding="utf-8"))
        self.file = path.open("a", encoding="utf-8")

    def _count(self, row: Row) -> str:
        """The line of a row, which from now on is part of the file."""
        line = _line(row)
        self.hash.update(line.encode())
        self.num_lines += 1
        return line

    def state(self) -> Json:
        """Number of lines and their checksum, which a checkpoint keeps; they are on disk by then."""
        if self.file is not None:
            with suppress(OSError):  # a pipe, say
                os.fsync(self.file.fileno())
        return {"lines": self.num_lines, "checksum": self.hash.hexdigest()[:32]}

    def add(self, row: Row) -> None:
        """Seen by any reader as soon as this returns."""
        if self.file is None:
            return
        try:
            self.file.write(self._count(row))
            self.file.flush()
        except OSError as reason:
            raise failed(f"write {self.file.name}", reason.strerror or reason, "free some room") from None
        if self.board is not None:
            for name, value in _flat(row):
                self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Close quietly: `add` has refused what could not be written; a second complaint would hide the first."""
        for one in (self.file, self.board):
            if one is not None:
                with suppress(OSError):
                    one.close()


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _flat(row: Row) -> Iterator[tuple[str, float]]:
    """Names as loggers like them: `validation/loss`, `attention/layer_00/head_00/xi`, `tokens/layer_00/residual`."""
    for name, value in row.items():
        if isinstance(value, int | float) and name != "step":
            yield f"{row['kind']}/{name}", value
    for group, place in (("heads", "attention"), ("layers", "tokens")):
        for part in row.get(group, []):
            at = f"{place}/{layer_key(part['layer'])}" + (f"/{head_key(part['head'])}" if "head" in part else "")
            numbers = {name: value for name, value in part.items() if name not in ("layer", "head")}
            yield from ((f"{at}/{name}", value) for name, value in numbers.items() if isinstance(value, int | float))


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing("the package tensorboard", extra="tensorboard") from None
    # Lines of a run that was stopped later than its last checkpoint are hidden by the viewer.
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)


@contextmanager
def bar(total: int, *, start: int, shown: bool) -> Iterator[Any]:
    """A function that is told step, loss and tokens per second; it draws on a terminal only."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        task = progress.add_task("starting", total=total, completed=start)

        def tell(step: int, loss: float, speed: float) -> None:
            progress.update(task, completed=step, description=f"loss {loss:.3f} · {speed:,.0f} tokens/s")

        yield tell
