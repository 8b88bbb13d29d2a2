"""Progress on standard error: a bar on a terminal, elsewhere (a log, a job) a line now and then."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from ..errors import shown
from .output import aside

BETWEEN_LINES = 10.0  # seconds: what is done sooner needs no line
Tell = Callable[[int, int], None]  # steps done, and in all


@contextmanager
def progress(task: str, *, steps: str, long: bool = False) -> Iterator[Tell]:
    """Gives a function to be told of steps (what they are says `steps`); a task that is `long` says that it begins."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(shown(task), steps, long=long)
        return
    with Progress(console=console, transient=True) as bar:
        number = bar.add_task(escape(shown(task)), total=None)
        yield lambda done, total: bar.update(number, completed=done, total=total)


def _lines(task: str, steps: str, *, long: bool) -> Tell:
    if long:
        aside(f"{task} …")
    last = monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if done < total and monotonic() - last >= BETWEEN_LINES:
            aside(f"{task}: {done} of {total} {steps}")
            last = monotonic()

    return tell
