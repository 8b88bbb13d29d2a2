"""Errors in three forms: a value that cannot be used, an action that failed, a thing that is missing.

Deep code raises `Refusal` with a short cause; a public door may prefix where it happened with `within`, and spans a
`net` under itself for unexpected exceptions.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from typing import Any

LONGEST = 1000  # letters of a part of a sentence: more is no sentence
DEBUG = "LOCATER_DEBUG"  # set it to see errors as Python shows them
CALLERS = "_locater_callers"  # the mark of an error that is not ours
# What stands between :// and @ in an address, and behind its question mark, opens doors.
LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
QUERY = re.compile(r"(://[^\s?'\"]+\?)[^\s'\")]+")


class Refusal(ValueError):
    """Something the user gave cannot be used; the message is one sentence fit to print as it is."""


class BadArguments(Refusal):
    """The arguments do not go together; a command exits with 2 where a plain refusal exits with 1."""


class Unforeseen(Refusal):
    """A fault of ours, met by whatever was given; its cause is the error itself."""


def shown(text: object, most: int = LONGEST) -> str:
    r"""Clean untrusted text for a terminal: mask secrets in addresses, escape invisible characters, truncate.

    >>> shown("a\x1b[31m\u202eb https://me:secret@host/x?signature=123")
    'a\\x1b[31m\\u202eb https://***@host/x?***'
    """
    whole = mask_secrets(str(text))
    if len(whole) > most:
        whole = f"{whole[: most * 2 // 3]} … ({len(whole) - most} letters left out) … {whole[-(most // 3) :]}"
    if whole.isprintable():
        return whole
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in whole)


def mask_secrets(text: str) -> str:
    """The text with the credentials and queries of its addresses left out."""
    return QUERY.sub(r"\1***", LOGIN.sub("***@", text)) if "://" in text else text


def counted(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> counted(1, "head"), counted(1024, "head")
    ('1 head', '1,024 heads')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def bad_value(expected: str, got: object, remedy: str = "") -> Refusal:
    """The exception for a value that was given and cannot be used.

    >>> raise bad_value("a length of at least 1", 0, "pass --length 128")
    Traceback (most recent call last):
    locater.errors.Refusal: expected a length of at least 1, got 0; pass --length 128
    """
    return _sentence(f"expected {shown(expected)}, got {shown(got)}", remedy)


def failed(action: str, cause: object, remedy: str = "") -> Refusal:
    """The exception for something that could not be done.

    >>> raise failed("write run/model", "No space left on device", "free some space")
    Traceback (most recent call last):
    locater.errors.Refusal: cannot write run/model: No space left on device; free some space
    """
    return _sentence(f"cannot {shown(action)}: {shown(cause)}", remedy)


def missing(what: str, remedy: str = "", *, extra: str = "") -> Refusal:
    """The exception for something that is not there; with `extra`, a package that an extra of locater installs.

    >>> raise missing("the package pandas", extra="report")
    Traceback (most recent call last):
    locater.errors.Refusal: missing the package pandas; pip install "locater[report]"
    """
    remedies = (install(extra) if extra else "", remedy)
    return _sentence(f"missing {shown(what)}", ", or ".join(filter(None, remedies)))


def install(*extras: str) -> str:
    """The command that installs extras of locater.

    >>> install("hf", "plot")
    'pip install "locater[hf,plot]"'
    """
    return f'pip install "locater[{",".join(extras)}]"'


def import_extra(module: str, what: str, *, extra: str) -> Any:
    """A module of a package that an extra of locater installs; `what` names it, and what it is for."""
    try:
        return import_module(module)
    except ImportError:
        raise missing(what, extra=extra) from None


def _sentence(said: str, remedy: str) -> Refusal:
    return Refusal(said + (f"; {shown(remedy)}" if remedy else ""))


refusal = bad_value


@contextmanager
def within(place: str) -> Iterator[None]:
    """Prefix any refusal raised inside with where it happened."""
    try:
        yield
    except Refusal as cause:
        kind = type(cause) if type(cause) in (BadArguments, Unforeseen) else Refusal
        raise kind(f"{shown(place)}: {cause}") from cause.__cause__


@contextmanager
def instead(
    refused: Callable[[Exception], Refusal], kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Turn exceptions of these kinds into a refusal: those of files and libraries that fail in ways of their own."""
    try:
        yield
    except Refusal:
        raise
    except kinds as cause:
        raise refused(cause) from None


@contextmanager
def net(what: str) -> Iterator[None]:
    """Turn unexpected exceptions at a public door into a refusal that names the input and asks for a report."""
    try:
        yield
    except Refusal:
        raise
    except Exception as cause:
        if os.environ.get(DEBUG) or getattr(cause, CALLERS, False):
            raise
        raise Unforeseen(f"{shown(what)}: {unforeseen(cause)}") from cause


@contextmanager
def callers_own() -> Iterator[None]:
    """Around a call back into the caller's code: its errors pass every net as they are."""
    try:
        yield
    except Exception as cause:
        setattr(cause, CALLERS, True)
        raise


def unforeseen(cause: BaseException) -> str:
    """The sentence for an error of ours: its kind, its place, and what to do."""
    if isinstance(cause, MemoryError):
        return "cannot read it: too little memory is free; free some"
    frames = extract_tb(cause.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return (
        f"cannot read it: {type(cause).__name__}{place} ({shown(cause, 160)}), a fault of "
        f"locater's; please report it with the file ({DEBUG}=1 shows all)"
    )
