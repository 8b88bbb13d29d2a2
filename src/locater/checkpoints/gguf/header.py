"""The header of a GGUF file: settings, then the names, shapes and places of the tensors. Nothing is mapped.

Every count in the file is checked against the bytes that are left before anything is made from it.
"""

import math
import struct
from typing import Any, NamedTuple

from ...budget import budget
from ...errors import refusal
from ...records import Json
from ..bytes import ByteSource, check_range

BLOCK = 256 * 2**10
MAX_SETTINGS, MAX_STRING, MAX_KEPT, MAX_DIMENSIONS = 2**16, 2**20, 2**12, 8
STRING, ARRAY = 8, 9
TOKENS = "tokenizer.ggml.tokens"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorInfo(NamedTuple):
    """One tensor: its shape in rows-first order, its kind of quantisation and its place in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


class Header(NamedTuple):
    """Metadata before the data; long lists are kept as their length only."""

    settings: Json
    tensors: dict[str, TensorInfo]


class Cursor:
    """Reads forward through a source, in blocks."""

    def __init__(self, source: ByteSource) -> None:
        self.source, self.position = source, 0
        self.block, self.block_start = bytearray(), 0

    @property
    def left(self) -> int:
        return self.source.size - self.position

    def take(self, length: int) -> bytearray:
        check_range(self.source, self.position, length)
        offset = self.position - self.block_start
        if offset + length > len(self.block):
            self.block_start, offset = self.position, 0
            self.block = self.source.read(self.position, max(length, min(BLOCK, self.left)))
        self.position += length
        return self.block[offset : offset + length]

    def skip(self, length: int) -> None:
        check_range(self.source, self.position, length)
        self.position += length

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str, *, unit: int, limit: int) -> int:
        """Read a count of things of at least `unit` bytes; refused when the file cannot hold them."""
        value = self.number("Q")
        if value > min(limit, self.left // unit):
            most = min(limit, self.left // unit)
            raise refusal(f"at most {most} {what} in {self.source.name}", value, "it is damaged; fetch it again")
        return value

    def text(self, errors: str = "strict") -> str:
        data = self.take(self.count("bytes of text", unit=1, limit=MAX_STRING))
        try:
            return data.decode("utf-8", errors)
        except UnicodeDecodeError:
            raise refusal(f"UTF-8 text in the header of {self.source.name}", "other bytes", "fetch it again") from None


def read_header(source: ByteSource, *, whole: str | None = None) -> Header:
    """Settings and tensors of a file; costs the header. Fails on any count or place that the file cannot hold.

    The list of the setting `whole` is kept, however long it is.
    """
    cursor = Cursor(source)
    magic, version = bytes(cursor.take(4)), cursor.number("I")
    if magic != b"GGUF" or version not in (2, 3):
        remedy = "convert it again with a current llama.cpp" if magic == b"GGUF" else "it is not a GGUF file"
        raise refusal(f"GGUF version 2 or 3 in {source.name}", f"{magic!r} version {version}", remedy)
    num_tensors = cursor.count("tensors", unit=24, limit=budget().tensors)
    num_settings = cursor.count("settings", unit=13, limit=MAX_SETTINGS)
    settings = _read_settings(cursor, num_settings, whole)
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    alignment = settings.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise refusal(f"a power of two as alignment in {source.name}", alignment)
    base = -(-cursor.position // alignment) * alignment
    tensors = {name: TensorInfo(shape, kind, base + offset) for name, shape, kind, offset in infos}
    if len(tensors) != len(infos):
        raise refusal(f"each tensor once in {source.name}", "one of them twice", "fetch it again")
    return Header(settings, tensors)


def _read_settings(cursor: Cursor, number: int, whole: str | None) -> Json:
    settings: Json = {}
    for _ in range(number):
        key = cursor.text()
        if key in settings:
            raise refusal(f"each setting once in {cursor.source.name}", f"{key[:80]!r} twice", "fetch it again")
        kind = cursor.number("I")
        settings[key] = _read_list(cursor, is_whole=key == whole) if kind == ARRAY else _read_value(cursor, kind)
    return settings


def _read_value(cursor: Cursor, kind: int, errors: str = "strict") -> Any:
    if kind in SCALARS:
        return cursor.number(SCALARS[kind])
    if kind != STRING:
        raise refusal(f"a known kind of setting in {cursor.source.name}", kind, "it is damaged; fetch it again")
    return cursor.text(errors)


def _read_list(cursor: Cursor, *, is_whole: bool) -> Any:
    """The items of a list; of a long one only their number, unless it is wanted whole."""
    inner = cursor.number("I")
    size = struct.calcsize("<" + SCALARS[inner]) if inner in SCALARS else 8
    number = cursor.count("items of a list", unit=size, limit=2**62)
    if number <= MAX_KEPT or is_whole:
        return [_read_value(cursor, inner, "strict" if number <= MAX_KEPT else "replace") for _ in range(number)]
    if inner in SCALARS:
        cursor.skip(number * size)
    elif inner != STRING:
        raise refusal(f"lists of numbers or text in {cursor.source.name}", f"kind {inner}", "fetch it again")
    else:
        for _ in range(number):
            cursor.skip(cursor.count("bytes of text", unit=1, limit=2**62))
    return number


def _read_info(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dimensions = cursor.text(), cursor.number("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise refusal(f"at most {MAX_DIMENSIONS} dimensions for {name[:80]!r}", num_dimensions, "fetch it again")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))[::-1]
    kind, offset = cursor.number("I"), cursor.number("Q")
    # A packed number takes at least one bit, so no shape may ask for more than eight per byte of the file.
    if math.prod(shape) > 8 * cursor.source.size or offset > cursor.source.size:
        raise refusal(
            f"{name[:80]!r} within {cursor.source.name}", f"shape {list(shape)} at {offset}", "fetch it again"
        )
    return name, shape, kind, offset


def read_vocabulary(source: ByteSource) -> list[str]:
    """Every token as text; costs the header. Empty where the file has none."""
    tokens = read_header(source, whole=TOKENS).settings.get(TOKENS, [])
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise refusal(f"tokens as text in {source.name}", f"{tokens!r:.40}", "fetch it again")
    return tokens
