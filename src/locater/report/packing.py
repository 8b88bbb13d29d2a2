"""Columns of numbers and a JSON document in one compressed block of text, the same bytes for the same input."""

import base64
import gzip
import json

import numpy

from ..records import Json

ALIGNMENT = 8
HALF_RANGE = 32_767


class Pack:
    """Collects arrays; the document refers to each by type, place and count."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, values: object, kind: str) -> Json:
        """Kinds as NumPy spells them, little-endian: f8, f4, i2, u2, u1."""
        data = numpy.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
        place = {"kind": kind, "at": self.size, "count": len(data) // int(kind[1])}
        padded = data + bytes(-len(data) % ALIGNMENT)
        self.parts.append(padded)
        self.size += len(padded)
        return place

    def add_scaled(self, rows: object) -> Json:
        """Rows of numbers in 16 bits: each is off by at most 1/65534 of its row's largest magnitude.

        A row that is not known throughout has no unit (NaN).
        """
        table = numpy.atleast_2d(numpy.asarray(rows, dtype=numpy.float64))
        largest = numpy.abs(table).max(axis=1, initial=0)
        unit = numpy.where(largest == 0, 1, largest) / HALF_RANGE
        whole = numpy.nan_to_num(numpy.rint(table / unit[:, None]))
        return {"values": self.add(whole, "i2"), "units": self.add(unit, "f8")}

    def text(self, document: Json) -> str:
        """Length of the JSON, the JSON padded, the columns; gzip without a date; base64."""
        head = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        head += b" " * (-len(head) % ALIGNMENT)
        whole = len(head).to_bytes(8, "little") + head + b"".join(self.parts)
        return base64.b64encode(gzip.compress(whole, compresslevel=9, mtime=0)).decode("ascii")
