"""Files of `torch.save`, read without executing anything: state dicts, bare or inside what scripts put around them.

There are two containers: a zip archive of storages, and the sequence of pickles used before it. Neither is loaded: the
pickle gives names and views, and only the bytes that a view spans are read.
"""

import io
import re
import reprlib
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor

from ...budget import budget
from ...errors import Refusal, instead, missing, refusal
from ...records import Json
from ..base import Checkpoint, Entry, Rows, read_tensor, row_span
from ..bytes import ByteSource, Part, Stream, check_range
from .pickles import CodeRefusal, Storage, Strided, damaged, load_pickle

Leaf = TypeVar("Leaf")

WRAPPERS = ("model_state_dict", "state_dict", "model", "module", "model_state", "app")
SETTINGS = ("model_args", "config", "hyper_parameters", "hparams", "dims")
# What `torch.compile` and sharding put into names, and data parallelism before them.
INNER, OUTER = re.compile(r"_(orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\."), "module."
# What training frameworks save beside a model that stands at the root: two or three times its size, and no part of it.
BESIDE = re.compile(r"^(optimizers?|optim|optimizer_states?|lr_schedulers?|dataloader|train_state|rng_state)(\.|$)")
DEPTH = 8


class TorchFile(Checkpoint):
    """Tensors of one file, each read when it is asked for; all in memory where its code was run at the user's word."""

    format = "torch"

    def __init__(self, source: ByteSource, *, config: Json, run_code: bool = False) -> None:
        self.archive = None if run_code else open_archive(source)
        tree = load_trusted(source) if self.archive is None else self.archive.tree
        self.leaves: dict[str, Strided | Tensor] = find_weights(tree, Strided if self.archive else Tensor)
        if not self.leaves:
            raise missing(f"tensors by name in {source.name}", "save a state dict")
        entries = {
            name: leaf.entry if isinstance(leaf, Strided) else Entry(tuple(leaf.shape), leaf.dtype)
            for name, leaf in self.leaves.items()
        }
        super().__init__(entries, config=config or find_settings(tree), place=source.name, parts=[source])

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        leaf = self.leaves[name]
        if self.archive is not None and isinstance(leaf, Strided):
            return self.archive.read(leaf, rows)
        assert isinstance(leaf, Tensor)
        return (leaf.detach() if rows is None else leaf.detach()[rows[0] : rows[1]]).clone()


def open_torch(source: ByteSource, *, config: Json, allow_pickle: bool) -> Checkpoint:
    """The weights of a file. A pickle that needs code is refused, nothing of it executed, unless that is allowed."""
    try:
        return TorchFile(source, config=config)
    except CodeRefusal as cause:
        if allow_pickle:
            warnings.warn(f"{source.name}: its code is run, as allow_pickle says", stacklevel=2)
            return TorchFile(source, config=config, run_code=True)
        remedy = "if you trust its author, pass allow_pickle=True (--allow-pickle); better, convert it to safetensors"
        raise CodeRefusal(f"{cause}; {remedy}") from None


def find_weights(tree: Any, kind: type[Leaf]) -> dict[str, Leaf]:
    """The tensors of a model among what was saved: those under a known wrapper if there is one, else all."""
    for _ in range(DEPTH):
        inner = _inside(tree, kind)
        if inner is None:
            break
        tree = inner
    found = dict(_flatten(tree, kind))
    own = {name: leaf for name, leaf in found.items() if not BESIDE.match(name)}
    return clean_names(own or found)


def _inside(tree: Any, kind: type) -> Any:
    """Return a wrapper's contents, or the one dict of tensors (not an optimiser's) in a sequence; None if neither."""
    if isinstance(tree, list | tuple):
        dicts = [one for one in tree if isinstance(one, Mapping) and "param_groups" not in one]
        holding = [one for one in dicts if any(_flatten(one, kind))]
        return holding[0] if len(holding) == 1 else None
    inner = (tree.get(key) for key in WRAPPERS) if isinstance(tree, Mapping) else ()
    return next((part for part in inner if isinstance(part, Mapping) and any(_flatten(part, kind))), None)


def find_settings(tree: object) -> Json:
    """Settings saved beside the weights, such as nanoGPT's `model_args`, with the tables and lists in them."""
    if not isinstance(tree, Mapping):
        return {}
    settings = next((tree[key] for key in SETTINGS if isinstance(tree.get(key), Mapping)), {})
    return _plain(settings, count())


def _plain(value: object, numbers: Iterator[int], depth: int = 0) -> Any:
    """The value as JSON would have it; of an object its kind alone, so that a setting is never lost in silence.

    A table may hold itself, or one table many times: what is written out is counted.
    """
    budget().check("settings", next(numbers))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth < DEPTH and isinstance(value, Mapping):
        return {str(key): _plain(inner, numbers, depth + 1) for key, inner in value.items()}
    if depth < DEPTH and isinstance(value, list | tuple):
        return [_plain(inner, numbers, depth + 1) for inner in value]
    return f"a {type(value).__name__}"


def clean_names(tensors: dict[str, Leaf]) -> dict[str, Leaf]:
    """Names without what `torch.compile`, FSDP and DDP put into them, unless two names would then be one."""
    cleaned = {INNER.sub("", name): tensor for name, tensor in tensors.items()}
    if all(name.startswith(OUTER) for name in cleaned):
        cleaned = {name.removeprefix(OUTER): tensor for name, tensor in cleaned.items()}
    return cleaned if len(cleaned) == len(tensors) else tensors


def _flatten(tree: object, kind: type[Leaf]) -> Iterator[tuple[str, Leaf]]:
    """Tensors of nested dicts by their joined names, each dict once: a dict may hold itself, many times over.

    Names are joined at the tensors, after the budget was asked: a long key stands before all that its dict holds.
    """
    limits, letters, visited = budget(), 0, set[int]()
    pending: list[tuple[tuple[str, ...], object]] = [((), tree)]
    while pending:
        path, node = pending.pop()
        if isinstance(node, kind):
            length = limits.check("name", sum(map(len, path)) + max(len(path) - 1, 0))
            letters = limits.check("names", letters + length)
            yield ".".join(path), node
        elif isinstance(node, Mapping) and id(node) not in visited and len(path) <= DEPTH * 4:
            visited.add(id(node))
            keys = (key for key in node if isinstance(key, str) or (isinstance(key, int) and abs(key) < 2**63))
            pending += reversed([((*path, str(key)), node[key]) for key in keys])


# ------------------------------------------------------------------------------------------------- the two containers
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
    tree = load_pickle(io.BytesIO(_content(source, infos[pickles[0]])), name=source.name, storages=used)
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
    stream, used = io.BufferedReader(Stream(source)), dict[str, Storage]()
    load = partial(load_pickle, stream, name=source.name, storages=used)
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


def load_trusted(source: ByteSource) -> Any:
    """Unpickle with the file's code allowed to run: only for authors the user trusts. Costs the whole file."""

    def refused(cause: Exception) -> Refusal:
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0][:160]
        return refusal(f"{source.name} to load with its code", reason, "the classes it was saved with are needed")

    with instead(refused):  # untrusted code can fail in any way
        tree = torch.load(Stream(source), map_location="cpu", weights_only=False)  # type: ignore[arg-type]
        return tree.state_dict() if isinstance(tree, torch.nn.Module) else tree
