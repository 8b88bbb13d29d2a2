"""Heads analysed by several threads: small matrices gain nothing from threads inside one operation."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

MOST_WORKERS = 4  # each has a buffer of its own, and memory is bounded


class Workers:
    """`count` threads, each of which runs torch without threads of its own; with one, all is done in place."""

    def __init__(self, pool: ThreadPoolExecutor | None, count: int) -> None:
        self.pool, self.count = pool, count

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return list((self.pool.map if self.pool else map)(function, items))


ALONE = Workers(None, 1)


@contextmanager
def workers() -> Iterator[Workers]:
    """As many as torch has threads, within bounds; torch gets its threads back afterwards."""
    threads = torch.get_num_threads()
    count = min(threads, MOST_WORKERS)
    if count == 1:
        yield ALONE
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield Workers(pool, count)
    finally:
        torch.set_num_threads(threads)
