"""A run in its folder: started, stopped by a signal or a number of steps, resumed, exported."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from locater.errors import Refusal, failed, refusal, within
from locater.records import Json, read_json, write_json

from ..data.sources import open_data
from ..data.text import would_read
from .checksums import seal, unseal
from .config import Config
from .loader import export
from .loop import Trainer, Validated
from .metrics import METRICS, bar, read_metrics
from .observe import plain_copy
from .processes import Processes, has_bf16, process_group

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

CONFIG, MODEL = "config.json", "model"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """State of a run: `signal` is set if one stopped it, `validation` is its last row of that kind."""

    folder: Path
    step: int
    num_steps: int
    validation: Json | None
    is_done: bool
    signal: int | None = None
    is_first: bool = True
    num_processes: int = 1

    def to_json(self) -> Json:
        """The document that `locater train --json` writes."""
        row = {"validation": self.validation, "step": self.step, "num_steps": self.num_steps, "done": self.is_done}
        return {"schema": "locater.train/1", "folder": str(self.folder)} | row


def start(config: Config, folder: Path, *, stop_after: int | None = None, say: Say = print) -> Outcome:
    """A new run; refuses a folder that holds anything, or that would be read as part of the data."""
    if would_read(Path(config.data.data), folder):
        raise refusal("a run outside of the folder that is its data", folder, "choose another --out")
    with process_group(config.loop.device) as processes, _claimed(folder, processes), locked(folder, processes):
        return _go(config, folder, processes, stop_after=stop_after, say=say)


def resume(
    folder: Path,
    *,
    length: Mapping[str, int | float] | None = None,
    data: str | None = None,
    stop_after: int | None = None,
    verified: bool = True,
    say: Say = print,
) -> Outcome:
    """Continue from the last checkpoint as if there was no stop; `length` (steps, epochs, patience) moves its end.

    `data` says where its data lies now, if elsewhere. The folder must hold what the run wrote, in this version on this
    kind of device, unless `verified` is false.
    """
    config = before = read_run_config(folder, verified=verified)
    if length:
        # As for a new run, epochs go before steps: with a new end those of before do not count any more.
        ends: dict[str, float] = {} if length.keys() == {"patience"} else {"epochs": 0.0}
        config = replace(config, loop=replace(config.loop, **{**ends, **length}))
    if data is not None:
        config = replace(config, data=replace(config.data, data=data))
    with process_group(config.loop.device) as processes, locked(folder, processes):
        return _go(config, folder, processes, before=before, stop_after=stop_after, verified=verified, say=say)


def read_run_config(folder: Path, *, verified: bool = False) -> Config:
    """The config that a run was started with; with `verified` only if it is unchanged."""
    path = folder / CONFIG
    try:
        document = read_json(path)
    except Refusal as reason:
        got = f"{folder} ({reason!s:.200})"
        raise refusal(f"the folder of a run, with {CONFIG}", got, "start one with --out") from None
    with within(str(path)):
        config = Config.from_dict(document)
    unseal(document, path, verified=verified)
    return config


@contextmanager
def _claimed(folder: Path, processes: Processes) -> Iterator[None]:
    """The folder of a new run; if nothing came into it, it is gone again, with the parents that were made for it."""
    made = [path for path in (folder, *folder.parents) if not path.exists()] if processes.is_first else []
    try:
        if processes.is_first:
            _claim(folder)
        processes.wait()
        yield
    except BaseException:
        for path in made:
            with suppress(OSError):  # something did come into it
                path.rmdir()
        raise


def _claim(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # What a process that was killed here left behind begins with a dot.
        taken = next((entry for entry in folder.iterdir() if not entry.name.startswith(".")), None)
    except OSError as reason:
        raise refusal(f"a folder to write at {folder}", reason.strerror or reason, "choose another --out") from None
    if taken is not None:
        remedy = f"continue it with --resume {shlex.quote(str(folder))}, or choose another --out"
        raise refusal("a new or empty folder for the run", f"{folder}, which holds {taken.name}", remedy)


@contextmanager
def locked(folder: Path, processes: Processes) -> Iterator[None]:
    """Lock this folder against other training processes; the lock ends with the process, however it dies."""
    if fcntl is None or not processes.is_first:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    assert fcntl is not None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise failed(f"train in {folder}", "another process trains there", "wait for its end") from None
    except OSError:
        pass  # a file system that locks no folders


@contextmanager
def _begun(config: Config, folder: Path, processes: Processes) -> Iterator[None]:
    """Keep the config of a new run, unless what follows is refused: then the folder is as empty as it was."""
    path = folder / CONFIG
    is_new = processes.is_first and not path.exists()
    if is_new:
        write_json(seal(config.to_dict()), path)
    try:
        yield
    except Exception:
        if is_new:
            path.unlink()
        raise


def _go(
    config: Config,
    folder: Path,
    processes: Processes,
    *,
    before: Config | None = None,
    stop_after: int | None,
    verified: bool = True,
    say: Say,
) -> Outcome:
    """Train to the end, or to where it is asked to stop; `before` is the config of a run that goes on."""
    say = say if processes.is_first else lambda sentence: None
    data = open_data(config.data, length=config.shape.context, seed=config.loop.seed, say=say)
    config = replace(config, data=data.options)
    if config.loop.precision == "bf16" and not has_bf16(processes.device):
        say("this processor has no instructions for bfloat16: float32 would be faster")
    with _begun(config, folder, processes):
        trainer = Trainer(config, data, folder, processes, before=before, verified=verified)
    trainer.say = say
    try:
        _check_end(trainer)
        if before is not None and (before != config or not verified):
            _change_config(trainer, before, say)
        with signals() as received, bar(trainer.num_steps, start=trainer.step, shown=processes.is_first) as tell:
            until = trainer.num_steps if stop_after is None else stop_after
            trainer.advance(until, tell=tell, validated=_line(trainer, say), stop=lambda: bool(received))
        plain = plain_copy(trainer.model, processes, config.stabiliser)
        if plain is not None:
            vocabulary = data.tokens.vocabulary if data.tokens else None
            export(plain, folder / MODEL, vocabulary, stabiliser=config.stabiliser)
    finally:
        trainer.watch.end()
        trainer.metrics.close()
    rows = [row for row in read_metrics(folder / METRICS) if row["kind"] == "validation"]
    last, stopped_by = rows[-1] if rows else None, received[0] if received else None
    who = processes.is_first, processes.count
    return Outcome(folder, trainer.step, trainer.num_steps, last, trainer.is_done, stopped_by, *who)


def _line(trainer: Trainer, say: Say) -> Validated:
    """A sentence per validation where no terminal shows a bar: in a file or a job's log."""
    if sys.stderr.isatty():
        return lambda row: None
    return lambda row: say(f"step {trainer.step} of {trainer.num_steps}: validation loss {row['loss']:.4f}")


def _check_end(trainer: Trainer) -> None:
    """Refuse an end that lies before the present step."""
    if trainer.num_steps < trainer.step:
        done = f"an end after the {trainer.step} steps that are done"
        raise refusal(done, f"{trainer.num_steps} steps", "start a shorter run with --out")


def _change_config(trainer: Trainer, before: Config, say: Say) -> None:
    """Keep a config with another end or place of its data; killed at any moment, the run has one of the two."""
    config, store = trainer.config, trainer.store
    if before.loop != config.loop and config.optimiser.schedule == "cosine":
        say("the cosine of the learning rate now has another end: a run begun with this length would differ")
    store.allow_configs([before.checksum, config.checksum])
    if trainer.processes.is_first:
        write_json(seal(config.to_dict()), trainer.folder / CONFIG)
    store.allow_configs([config.checksum])


@contextmanager
def signals() -> Iterator[list[int]]:
    """SIGINT (Ctrl-C) and SIGTERM are noted, and the step is finished; a second one ends the process at once."""
    received: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:
        pass  # not the main thread, which alone may listen
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
