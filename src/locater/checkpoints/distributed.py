"""Directories of `torch.distributed.checkpoint`: a pickled `.metadata`, and tensors in chunks over many files."""

import io
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from ..budget import budget, check_memory
from ..errors import missing, refusal
from ..records import Json, check_beside
from .base import Checkpoint, Entry, Rows, are_counts
from .bytes import ByteSource, Folder, LocalFolder, Part, check_range, find_file
from .torch import find_weights, open_archive
from .torch.pickles import ADMITTED, CodeRefusal, Record, Strided, load_pickle


class TensorRecord(Record):
    """`TensorStorageMetadata`."""


class IndexRecord(Record):
    """`MetadataIndex`."""


class MemoryFormat(Record):
    """An enumeration of torch's, of no use here."""


def member(kind: object, name: object) -> MemoryFormat:
    """Build an enum member as early versions of Python 3.11 pickle it: by `getattr`, allowed for nothing else."""
    if kind is not MemoryFormat or not isinstance(name, str) or not name.startswith("TORCH_"):
        raise CodeRefusal(str(refusal("a pickle of plain tensors", "one that asks for the code 'builtins.getattr'")))
    return MemoryFormat()


METADATA_MODULE = "torch.distributed.checkpoint.metadata"
NAMED = ", which .metadata names"
PLAIN = ("Metadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata", "StorageMeta")
PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
NAMES = {
    **ADMITTED,
    **{(METADATA_MODULE, name): Record for name in PLAIN},
    (METADATA_MODULE, "TensorStorageMetadata"): TensorRecord,
    (METADATA_MODULE, "MetadataIndex"): IndexRecord,
    (METADATA_MODULE, "_MEM_FORMAT_ENCODING"): MemoryFormat,
    ("builtins", "getattr"): member,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): Record,
    **{(module, name): Record for module in ("pathlib", "pathlib._local") for name in PATHS},
}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the stretch of a file that holds it as `torch.save` wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Chunked:
    """One tensor in its chunks."""

    entry: Entry
    chunks: tuple[Chunk, ...]


class Distributed(Checkpoint):
    """Tensors of all ranks; a read opens only the chunks that hold the rows asked for."""

    format = "distributed"

    def __init__(self, folder: Folder, metadata: ByteSource, *, config: Json) -> None:
        self.tensors = find_weights(read_metadata(metadata), Chunked)
        chunks = [chunk for tensor in self.tensors.values() for chunk in tensor.chunks]
        self.sources = {file: find_file(folder, file, NAMED) for file in sorted({chunk.file for chunk in chunks})}
        for chunk in chunks:
            check_range(self.sources[chunk.file], chunk.start, chunk.length)
        if not self.tensors:
            raise missing(f"tensors in {folder.place}", "name the directory of a model's checkpoint")
        entries = {name: tensor.entry for name, tensor in self.tensors.items()}
        super().__init__(entries, config=config, place=folder.place, parts=self.sources.values())

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        tensor = self.tensors[name]
        shape = tensor.entry.shape
        if len(tensor.chunks) == 1:
            return self._read_chunk(tensor.chunks[0], tensor.entry.dtype, rows)
        first, last = rows or (0, shape[0])
        check_memory((last - first) * math.prod(shape[1:]) * tensor.entry.dtype.itemsize, name[:80])
        whole = torch.zeros((last - first, *shape[1:]), dtype=tensor.entry.dtype)
        for chunk in tensor.chunks:
            start, stop = max(first, chunk.offsets[0]), min(last, chunk.offsets[0] + chunk.sizes[0])
            if start < stop and math.prod(chunk.sizes):
                within = (start - chunk.offsets[0], stop - chunk.offsets[0])
                inner = zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
                box = (slice(start - first, stop - first), *(slice(low, low + size) for low, size in inner))
                whole[box] = self._read_chunk(chunk, tensor.entry.dtype, within)
        return whole

    def _read_chunk(self, chunk: Chunk, dtype: torch.dtype, rows: Rows | None) -> Tensor:
        archive = open_archive(Part(self.sources[chunk.file], chunk.start, chunk.length))
        if not isinstance(archive.tree, Strided) or archive.tree.entry != Entry(chunk.sizes, dtype):
            got = archive.tree.entry if isinstance(archive.tree, Strided) else type(archive.tree).__name__
            raise refusal(
                f"a chunk of shape {list(chunk.sizes)} and {dtype} at byte {chunk.start} of {chunk.file}", got
            )
        return archive.read(archive.tree, rows)


def check_harmless(folder: Path) -> None:
    """Refuse a directory that torch's own loader could not load without running code: it unpickles what it finds.

    Everything in `.metadata` must be on our list, and so must everything in entries that are no tensors.
    """
    place = LocalFolder(folder)
    source = place.find(".metadata")
    if source is None:
        raise refusal(f"a checkpoint in {folder}", "no .metadata", "name the directory of a checkpoint")
    tensors, storage, _ = _state(source)
    for index, info in storage.items():
        name = _index_key(index)[0]
        if not isinstance(tensors.get(name), TensorRecord):
            if not isinstance(info, Record):
                raise missing(f"the place of {name[:80]!r} in .metadata", "do not load this checkpoint")
            start, length = _counts((info.get("offset"), info.get("length")), "the place of an object")
            file = find_file(place, check_beside(info.get("relative_path"), ".metadata"), NAMED)
            open_archive(Part(file, start, length))


def _state(source: ByteSource) -> tuple[Mapping[Any, Any], Mapping[Any, Any], Any]:
    """The tensors, their places and the planner's notes, built from data alone."""
    budget().check("pickle bytes", source.size)
    metadata = load_pickle(io.BytesIO(source.read(0, source.size)), name=source.name, admitted=NAMES)
    tensors, storage = (_mapping(metadata, key) for key in ("state_dict_metadata", "storage_data"))
    return tensors, storage, metadata.get("planner_data")


def read_metadata(source: ByteSource) -> dict[str, Any]:
    """The saved tree, nested as it was before it was flattened, with `Chunked` for each tensor."""
    tensors, storage, paths = _state(source)
    places = {_index_key(index): info for index, info in storage.items()}
    tree: dict[str, Any] = {}
    for name, record in tensors.items():
        if isinstance(record, TensorRecord) and isinstance(name, str):
            path = paths.get(name) if isinstance(paths, Mapping) else None
            _plant(tree, path if isinstance(path, tuple) and path else (name,), _parse_tensor(name, record, places))
    return tree


def _mapping(metadata: object, key: str) -> Mapping[Any, Any]:
    value = metadata.get(key) if isinstance(metadata, Record) else None
    if not isinstance(value, Mapping):
        raise refusal(f"a mapping {key} in .metadata", type(value).__name__, "save again with dcp.save")
    return value


def _plant(tree: dict[str, Any], path: tuple[object, ...], leaf: Chunked) -> None:
    for key in path[:-1]:
        inner = tree.setdefault(str(key) if isinstance(key, str | int) else "", {})
        if not isinstance(inner, dict):
            raise refusal("one meaning of each name in .metadata", "two")
        tree = inner
    tree[str(path[-1]) if isinstance(path[-1], str | int) else ""] = leaf


def _index_key(index: object) -> tuple[str, tuple[int, ...]]:
    name, offset = (index.get("fqn"), index.get("offset")) if isinstance(index, IndexRecord) else (None, None)
    return (name if isinstance(name, str) else "", _counts(offset or (), "the offset of a chunk"))


def _parse_tensor(name: str, record: Record, places: Mapping[Any, Any]) -> Chunked:
    properties, chunks = record.get("properties"), record.get("chunks")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else None  # as TensorProperties.__getstate__ orders it
    if not isinstance(dtype, torch.dtype) or not isinstance(chunks, list) or not chunks:
        raise refusal(f"a dtype and chunks for {name[:80]!r} in .metadata", "something else")
    entry = Entry(_counts(record.get("size"), f"the shape of {name[:80]!r}"), dtype)
    parsed = tuple(_parse_chunk(name, chunk, entry, places) for chunk in chunks)
    volume = sum(math.prod(chunk.sizes) for chunk in parsed)
    distinct = len({(chunk.file, chunk.start) for chunk in parsed})
    if volume != math.prod(entry.shape) or distinct != len(parsed) or _overlap(parsed):
        raise refusal(
            f"chunks that make up {name[:80]!r} of shape {list(entry.shape)}", f"{volume} elements in {distinct}"
        )
    return Chunked(entry, parsed)


def _overlap(chunks: tuple[Chunk, ...]) -> bool:
    """Tell whether two boxes share a number: then, as they fill the tensor by count, others would be read as zero."""
    active: list[Chunk] = []
    for chunk in sorted((chunk for chunk in chunks if math.prod(chunk.sizes)), key=lambda chunk: chunk.offsets):
        active = [one for one in active if not chunk.offsets or one.offsets[0] + one.sizes[0] > chunk.offsets[0]]
        if any(_share(one, chunk) for one in active):
            return True
        active.append(chunk)
    return False


def _share(one: Chunk, other: Chunk) -> bool:
    sides = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(low < start + size and start < low + length for low, length, start, size in sides)


def _parse_chunk(name: str, record: object, entry: Entry, places: Mapping[Any, Any]) -> Chunk:
    offsets, sizes = (
        _counts(record.get(key) if isinstance(record, Record) else None, f"the {key} of a chunk")
        for key in ("offsets", "sizes")
    )
    if not len(offsets) == len(sizes) == len(entry.shape) or any(
        low + size > whole for low, size, whole in zip(offsets, sizes, entry.shape, strict=True)
    ):
        raise refusal(f"a chunk within {name[:80]!r} of shape {list(entry.shape)}", f"{sizes} at {offsets}")
    info = places.get((name, offsets))
    if not isinstance(info, Record):
        raise missing(f"the place of the chunk at {list(offsets)} of {name[:80]!r} in .metadata")
    if info.get("transform_descriptors"):
        raise refusal("chunks as they are", "chunks that were transformed (compressed) on saving", "save without it")
    start, length = _counts((info.get("offset"), info.get("length")), "the place of a chunk")
    return Chunk(offsets, sizes, check_beside(info.get("relative_path"), ".metadata"), start, length)


def _counts(values: Any, what: str) -> tuple[int, ...]:
    if not are_counts(values):
        raise refusal(f"whole numbers as {what} in .metadata", reprlib.repr(values))
    return tuple(values)
