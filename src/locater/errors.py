"""Errors that word themselves: what was expected, what came, what to do.

Deep code raises `Refusal` with a short cause; a public door may prefix where it happened with `within`.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Refusal(ValueError):
    """Something the user gave cannot be used; the message is one sentence fit to print as it is."""


def refusal(expected: str, got: object, remedy: str = "") -> Refusal:
    """The exception to raise, with its sentence.

    >>> raise refusal("a length of at least 1", 0, "pass --length 128")
    Traceback (most recent call last):
    locater.errors.Refusal: expected a length of at least 1, got 0; pass --length 128
    """
    return Refusal(f"expected {expected}, got {got}" + (f"; {remedy}" if remedy else ""))


@contextmanager
def within(place: str) -> Iterator[None]:
    """Prefix any refusal raised inside with where it happened."""
    try:
        yield
    except Refusal as cause:
        raise Refusal(f"{place}: {cause}") from None


class BadArguments(Refusal):
    """The arguments do not go together; a command exits with 2 where a plain refusal exits with 1."""
