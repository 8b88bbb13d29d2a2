"""The tokens of a GGUF file, in the order of their ids: the one long list that its header is read for."""

from ...errors import refusal
from ..bytes import ByteSource
from .header import ARRAY, MAX_SETTINGS, MAX_STRING, STRING, Cursor, read_header, read_value

TOKENS = "tokenizer.ggml.tokens"
START = 24  # magic, version, number of tensors, number of settings


def read_vocabulary(source: ByteSource) -> list[str]:
    """Every token as text; costs the header. Empty where the file has none."""
    read_header(source)  # which refuses what is damaged
    cursor = Cursor(source)
    cursor.skip(START - 8)
    for _ in range(cursor.count("settings", unit=13, limit=MAX_SETTINGS)):
        key, kind = cursor.text(), cursor.number("I")
        if key == TOKENS and kind == ARRAY:
            return _texts(cursor)
        read_value(cursor, kind)
    return []


def _texts(cursor: Cursor) -> list[str]:
    if (kind := cursor.number("I")) != STRING:
        raise refusal(f"tokens as text in {cursor.source.name}", f"kind {kind}", "fetch it again")
    number = cursor.count("tokens", unit=8, limit=2**62)
    sizes = (cursor.count("bytes of text", unit=1, limit=MAX_STRING) for _ in range(number))
    return [cursor.take(size).decode("utf-8", errors="replace") for size in sizes]
