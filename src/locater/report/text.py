"""Strings that others wrote, as text that can be shown: nothing in them runs, hides or turns the line around."""

import unicodedata
from typing import Any

MOST_CHARACTERS = 300


def shown(text: str, *, most: int = MOST_CHARACTERS) -> str:
    r"""Control characters and marks that turn the direction are spelt out; what is too long is cut in the middle.

    >>> shown("a\u202eb\x00")
    'a\\u202eb\\x00'
    >>> shown("abcdefghij", most=5)
    'ab…ij'
    """
    if len(text) > most:  # cut first: a million characters need not be looked at
        half = most // 2
        text = f"{text[:half]}…{text[-half:]}"
    return "".join(_spelt(character) for character in text)


def all_shown(value: object) -> Any:
    """The same for every string in a document, keys included."""
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, dict):
        return {shown(str(key)): all_shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [all_shown(one) for one in value]
    return value


def _spelt(character: str) -> str:
    # Categories: control, format (direction marks, joiners), surrogate, private use, line and paragraph separators.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return character.encode("unicode_escape").decode("ascii")
    return character
