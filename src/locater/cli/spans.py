"""Numbers as a user types them: `0-5,11`."""

import re

from ..errors import BadArguments

MOST = 100_000  # in one span: more is a slip of the finger, and would fill the memory


def parse_spans(text: str | None, option: str) -> list[int] | None:
    """All numbers that are named; None where the option was not given.

    >>> parse_spans("0-2,7", "--layers")
    [0, 1, 2, 7]
    """
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(MOST):
            raise BadArguments(f"{option} expects numbers and spans such as 0-5,11, got {text!r}")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found
