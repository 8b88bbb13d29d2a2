"""Byte sources: a part of a file, near or far, read into memory and never mapped; and the JSON objects in them.

Mapped pages count as memory of the process for as long as the mapping lives; bytes that were read can be freed.
"""

import io
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..budget import budget, limited
from ..errors import Refusal, failed, instead, missing, refusal, within
from ..records import Json, check_object, parse_json


class ByteSource(ABC):
    """A file of known size."""

    name: str
    size: int

    def read(self, start: int, length: int) -> bytearray:
        """Exactly these bytes; fails in a sentence when the file does not hold them."""
        check_range(self, start, length)
        data = bytearray(length)
        self.readinto(start, memoryview(data))
        return data

    @abstractmethod
    def readinto(self, start: int, view: memoryview) -> None:
        """Fill the view with the bytes from `start` on; fails as `read` does."""

    def close(self) -> None:  # noqa: B027  (most sources hold nothing open)
        """Close what is open."""


@runtime_checkable
class Folder(Protocol):
    """A place that holds the files of one checkpoint."""

    @property
    def place(self) -> str: ...

    def files(self) -> frozenset[str]:
        """The names that can be listed; none where the place cannot list."""
        ...

    def find(self, name: str) -> ByteSource | None: ...


def find_file(folder: Folder, name: str, named: str = "") -> ByteSource:
    """A file that must be there; `named` says by whose word."""
    source = folder.find(name)
    if source is None:
        raise missing(f"the file {name[:120]} in {folder.place}{named}", "fetch it again")
    return source


class LocalBytes(ByteSource):
    """A file on disk, opened for each read: nothing to close, and no limit on how many shards there are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.size = path.stat().st_size

    def readinto(self, start: int, view: memoryview) -> None:
        check_range(self, start, len(view))
        with reading(self.name), self.path.open("rb", buffering=0) as file:
            file.seek(start)
            # One call may return less than asked, and never more than 2 GiB on Linux.
            while view and (count := file.readinto(view)):
                view = view[count:]
        if view:
            raise refusal(f"{self.size} bytes in {self.name}", "fewer", "the file changed while it was read")


class LocalFolder:
    """A directory on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = str(path)

    @staticmethod
    def is_one(text: str) -> bool:
        """Tell whether a text names a directory on this disk."""
        try:
            return Path(text).expanduser().is_dir()
        except (OSError, ValueError, RuntimeError):  # a name too long, a null byte, a home that is not known
            return False

    def files(self) -> frozenset[str]:
        with reading(self.place):
            return frozenset(path.name for path in self.path.iterdir() if path.is_file())

    def find(self, name: str) -> LocalBytes | None:
        path = self.path / name
        with reading(name):
            return LocalBytes(path) if path.is_file() else None


class Part(ByteSource):
    """A stretch of another source, as a source."""

    def __init__(self, source: ByteSource, start: int, size: int) -> None:
        check_range(source, start, size)
        self.source, self.start, self.size, self.name = source, start, size, source.name

    def readinto(self, start: int, view: memoryview) -> None:
        check_range(self, start, len(view))
        self.source.readinto(self.start + start, view)


class Stream(io.RawIOBase):
    """A source as a seekable file, for the readers of the standard library."""

    def __init__(self, source: ByteSource) -> None:
        self.source, self.position = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.source.size}[whence]
        if base + offset < 0:
            raise OSError("seek before the start of the file")
        self.position = base + offset
        return self.position

    def read(self, size: int = -1, /) -> bytes:
        # The inherited method sets aside what is asked for, however little there is.
        left = max(0, self.source.size - self.position)
        length = left if size is None or size < 0 else min(size, left)
        data = bytes(self.source.read(self.position, length)) if length else b""
        self.position += length
        return data

    def readinto(self, buffer) -> int:  # noqa: ANN001  (any writable buffer)
        length = max(0, min(len(buffer), self.source.size - self.position))
        buffer[:length] = self.source.read(self.position, length) if length else b""
        self.position += length
        return length


def reading(name: str) -> AbstractContextManager[None]:
    """Say in a sentence why the system would not let a file be read."""

    def refused(cause: Exception) -> Refusal:
        return failed(f"read {name[:200]!r}", getattr(cause, "strerror", None) or cause, "check its permissions")

    return instead(refused, (OSError, ValueError))


def check_range(source: ByteSource, start: int, length: int) -> None:
    """Refuse a stretch that the source does not hold, before any memory is set aside for it."""
    if start < 0 or length < 0 or start + length > source.size:
        raise refusal(
            f"{source.name} to hold bytes {start} to {start + length}",
            f"a file of {source.size} bytes",
            "it is truncated or damaged; fetch it again",
        )


def parse_object(data: bytes | bytearray, *, name: str) -> Json:
    """The JSON object in `data`; fails on anything else, and on keys that occur twice."""
    with within(name):
        budget().check("json bytes", len(data))
        return check_object(parse_json(data, constant=float))  # configs of transformers hold Infinity


def read_object(source: ByteSource) -> Json:
    """The JSON object that a whole file holds."""
    with within(source.name):
        budget().check("json bytes", source.size)
    return parse_object(source.read(0, source.size), name=source.name)


def read_settings(source: ByteSource) -> Json:
    """The JSON object that a config holds, which is of the size that people write."""
    with limited(json_bytes=budget().config_bytes):
        return read_object(source)


def read_model_config(folder: Folder) -> Json:
    """`config.json` of a folder, or what Meta and Mistral call it, or nothing."""
    source = folder.find("config.json") or folder.find("params.json")
    return read_settings(source) if source else {}
