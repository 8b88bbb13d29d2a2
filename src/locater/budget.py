"""Limits for untrusted files, in one place: every count is held against them, and against what the file holds,
before anything is made from it. Processor time and memory are bounded by counts; the clock is for servers.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import TypeVar

from .errors import failed, net, refusal

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Budget:
    """The defaults are an order of magnitude above what any published checkpoint needs."""

    json_bytes: int = 24 * 2**20  # Python objects take some 25 times the room of the JSON that makes them
    config_bytes: int = 4 * 2**20  # of a config, beside which a header of the largest size may lie
    result_bytes: int = 32 * 2**20  # of a scan, a prediction, a row
    pickle_bytes: int = 64 * 2**20
    opcodes: int = 3_000_000  # of one pickle
    layout_bytes: int = 2**17  # a second or two of the YAML reader
    tensors: int = 2**20
    name: int = 1000  # letters of a tensor's name
    names: int = 64 * 2**20  # of all of them
    layers: int = 10_000
    heads: int = 65_536
    patterns: int = 64  # of an adapter
    settings: int = 100_000  # beside weights, each as often as it is written out
    deadline: float | None = None  # of the monotonic clock, for what comes through a network

    def check(
        self, what: str, number: int, *, holds: int | None = None, remedy: str = "correct or fetch it again"
    ) -> int:
        """Return the count, if it is within the budget and, with `holds`, the file can have as many."""
        most = getattr(self, what.replace(" ", "_"))
        most = most if holds is None else min(most, holds)
        if number > most:
            raise refusal(f"at most {most} {what.replace('_', ' ')}", number, remedy)
        return number

    def seconds_left(self) -> float | None:
        """Until the deadline; refused when it has passed."""
        if self.deadline is None:
            return None
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise failed("read it", "no answer within --timeout", "allow more seconds, or fetch the files first")
        return left


DEFAULT = Budget()
_current: ContextVar[Budget] = ContextVar("budget", default=DEFAULT)


def budget() -> Budget:
    """The one in force."""
    return _current.get()


def end_of(seconds: float | None) -> float | None:
    """Deadline, this many seconds from the present."""
    if seconds is not None and not seconds > 0:
        raise refusal("a positive number of seconds as the time limit", seconds)
    return None if seconds is None else time.monotonic() + seconds


@contextmanager
def limited(*, seconds: float | None = None, deadline: float | None = None, **limits: int) -> Iterator[Budget]:
    """Other limits for what is done inside; `seconds` of the clock from now on, or fewer if fewer are left outside."""
    ends = [end for end in (_current.get().deadline, deadline, end_of(seconds)) if end is not None]
    token = _current.set(replace(_current.get(), **limits, deadline=min(ends, default=None)))
    try:
        yield _current.get()
    finally:
        with suppress(ValueError):  # a generator that is closed in another context than it was made in
            _current.reset(token)


@contextmanager
def door(what: str, *, seconds: float | None = None) -> Iterator[None]:
    """Wrap a public entry point that opens an untrusted file: error boundary and timeout."""
    with net(what), limited(seconds=seconds):
        yield


def timed(request: Callable[[], Answer]) -> Answer:
    """Run the request, or refuse at the deadline: for libraries that take no timeout themselves.

    One that is late goes on alone, in a thread that ends with the process.
    """
    left = budget().seconds_left()
    if left is None:
        return request()
    answer, context = Future[Answer](), copy_context()

    def run() -> None:
        try:
            answer.set_result(context.run(request))
        except BaseException as cause:  # noqa: BLE001  (raised again in the waiting thread)
            answer.set_exception(cause)

    Thread(target=run, daemon=True).start()
    with suppress(TimeoutError):
        return answer.result(left)
    if not answer.done():
        budget().seconds_left()  # which refuses
    return answer.result()


def check_memory(needed: int, what: str) -> None:
    """Refuse to set aside more than the machine has left: a sparse file can hold any number of zeros."""
    if needed > 2**28 and (available := _available()) is not None and needed > available:
        room = f"{what} to fit in the {available // 2**20} MB of memory that are free"
        raise refusal(room, f"{needed // 2**20} MB", "use a machine with more")


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None  # another system
