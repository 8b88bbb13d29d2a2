"""The two containers of `torch.save`: a zip archive of storages, and the sequence of pickles used before it.

Neither is loaded: the pickle gives names and views, and only the bytes that a view spans are read.
"""

import io
import reprlib
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from ...budget import budget
from ...errors import Refusal, instead, refusal
from ..base import Rows, read_tensor, row_span
from ..bytes import ByteSource, Part, Stream, check_range
from .pickles import ADMITTED, Storage, Strided, damaged, load_pickle, storage_from

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class Archive:
    """Saved objects, with `View` for each tensor, and the place of each storage."""

    source: ByteSource
    tree: Any
    places: dict[str, int]

    def read(self, view: Strided, rows: Rows | None) -> Shaped[Tensor, "..."]:
        """Rows of a view; a view that is not contiguous costs its whole extent."""
        itemsize, place = view.entry.dtype.itemsize, self.places[view.storage.key]
        # Negative: the position of a zip entry's own header, whose padding only that header tells.
        start = (place if place >= 0 else _after_header(self.source, ~place)) + view.offset * itemsize
        if view.is_contiguous:
            skipped, shape = row_span(view.entry.shape, itemsize, rows)
            return read_tensor(self.source, start + skipped, view.entry.dtype, shape)
        numbers = read_tensor(self.source, start, view.entry.dtype, (view.extent,))
        whole = numbers.as_strided(view.entry.shape, view.stride)
        return (whole if rows is None else whole[rows[0] : rows[1]]).contiguous()


def open_archive(source: ByteSource) -> Archive:
    """The archive in a file; fails on code, on damage, and on tensors whose bytes are not there."""
    is_zip = source.size >= 4 and source.read(0, 4) == b"PK\x03\x04"
    with instead(lambda cause: damaged(f"{source.name} as torch.save writes it", cause)):  # zipfile fails in many ways
        return _open_zip(source) if is_zip else _open_legacy(source)


def _open_zip(source: ByteSource) -> Archive:
    with zipfile.ZipFile(Stream(source)) as archive:  # type: ignore[arg-type]
        infos = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in infos if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise refusal(f"one data.pkl in {source.name}", f"{len(pickles)}", "it was not written by torch.save")
    root = pickles[0].removesuffix("data.pkl")
    if (order := infos.get(root + "byteorder")) and bytes(_content(source, order)) != b"little":
        raise refusal(f"little-endian numbers in {source.name}", "big-endian ones", "save it again on a usual machine")
    used: dict[str, Storage] = {}
    stream = io.BytesIO(_content(source, infos[pickles[0]]))
    tree = load_pickle(stream, name=source.name, admitted=ADMITTED, persistent=lambda pid: _note(used, pid))
    return Archive(source, tree, {key: _place(source, infos, root, storage) for key, storage in used.items()})


def _place(source: ByteSource, infos: dict[str, zipfile.ZipInfo], root: str, storage: Storage) -> int:
    info = infos.get(f"{root}data/{storage.key}")
    if info is None or info.file_size < storage.num_bytes:
        got = "nothing there" if info is None else f"{info.file_size} bytes"
        raise refusal(f"{storage.num_bytes} bytes for storage {storage.key[:40]!r} in {source.name}", got)
    _check_stored(source, info)
    return ~info.header_offset


def _content(source: ByteSource, info: zipfile.ZipInfo) -> bytearray:
    _check_stored(source, info)
    budget().check("pickle bytes", info.file_size)
    return source.read(_after_header(source, info.header_offset), info.file_size)


def _check_stored(source: ByteSource, info: zipfile.ZipInfo) -> None:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size != info.compress_size:
        raise refusal(f"plain entries in {source.name}", f"{info.filename[:80]} compressed or encrypted")
    check_range(source, info.header_offset, LOCAL_HEADER.size + info.file_size)


def _after_header(source: ByteSource, start: int) -> int:
    magic, name_length, extra_length = LOCAL_HEADER.unpack(source.read(start, LOCAL_HEADER.size))
    if magic != b"PK\x03\x04":
        raise refusal(f"an entry at byte {start} of {source.name}", "something else", "it is damaged; fetch it again")
    return start + LOCAL_HEADER.size + name_length + extra_length


def _open_legacy(source: ByteSource) -> Archive:
    stream = io.BufferedReader(Stream(source))
    used: dict[str, Storage] = {}

    def load() -> Any:
        return load_pickle(stream, name=source.name, admitted=ADMITTED, persistent=lambda pid: _note(used, pid))

    if load() != LEGACY_MAGIC:
        raise refusal(f"{source.name} as torch.save writes it", "another pickle", "save the weights with torch.save")
    _version, _system, tree, keys = load(), load(), load(), load()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or set(used) != set(keys):
        raise refusal(f"the list of storages in {source.name}", reprlib.repr(keys), "it is damaged; fetch it again")
    places, position = {}, stream.tell()
    for key in keys:
        if struct.unpack("<q", source.read(position, 8))[0] != used[key].count:
            raise refusal(f"the length of storage {key[:40]!r} in {source.name}", "another", "it is damaged")
        places[key] = Part(source, position + 8, used[key].num_bytes).start
        position = places[key] + used[key].num_bytes
    return Archive(source, tree, places)


def _note(used: dict[str, Storage], pid: object) -> Storage:
    storage = storage_from(pid)
    if used.setdefault(storage.key, storage) != storage:
        raise refusal(f"one meaning of storage {storage.key[:40]!r}", "two")
    return storage


def load_trusted(source: ByteSource) -> Any:
    """Unpickle with the file's code allowed to run: only for authors the user trusts. Costs the whole file."""

    def refused(cause: Exception) -> Refusal:
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0][:160]
        return refusal(f"{source.name} to load with its code", reason, "the classes it was saved with are needed")

    with instead(refused):  # untrusted code can fail in any way
        tree = torch.load(Stream(source), map_location="cpu", weights_only=False)  # type: ignore[arg-type]
        return tree.state_dict() if isinstance(tree, torch.nn.Module) else tree
