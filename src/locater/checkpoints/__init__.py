"""Stored weights of any common kind, opened by one call and read one tensor at a time."""

import os
from collections.abc import Callable
from typing import Any

from ..errors import refuse, within
from .base import Checkpoint, Entry
from .bytes import ByteSource, Folder
from .distributed import Distributed
from .document import read_config
from .gguf import open_gguf
from .locate import GGUF, INDEX, METADATA, SAFETENSORS, TORCH, choose, locate
from .safetensors import SafetensorsFile
from .sharded import join_files, open_index
from .torch_file import open_torch

__all__ = ["Checkpoint", "Entry", "open"]

Source = str | os.PathLike[str]


def open(source: Source, *, adapter: Source | None = None, allow_pickle: bool = False) -> Checkpoint:
    """The weights at a directory, a file, a hub id or an address; with `adapter`, a LoRA merged into them on reading.

    Costs the headers. Fails, in one sentence, on anything damaged, missing or not admitted; a pickle that asks for
    code to run is refused unless `allow_pickle` says that its author is trusted.
    """
    with within(os.fspath(source)):
        folder, file = locate(source)
        return _open_files(folder, [file] if file else choose(folder), allow_pickle=allow_pickle)


def _open_files(folder: Folder, files: list[str], *, allow_pickle: bool) -> Checkpoint:
    config = read_config(folder)
    first = folder.find(files[0])
    if first is None:
        raise refuse(f"the file {files[0]} in {folder.place}", "no such file")
    if files[0].endswith(METADATA):
        return Distributed(folder, first, config=config)
    if files[0].endswith(GGUF):
        return open_gguf(folder, files, config=config)
    open_one = _reader(files[0], config, allow_pickle=allow_pickle)
    if files[0].endswith(INDEX):
        return open_index(folder, first, open_shard=open_one, config=config)
    if len(files) > 1:
        return join_files(folder, files, open_shard=open_one, config=config)
    return open_one(first)


def _reader(file: str, config: dict[str, Any], *, allow_pickle: bool) -> Callable[[ByteSource], Checkpoint]:
    kind = file.removesuffix(INDEX)
    if kind.endswith(SAFETENSORS):
        return lambda source: SafetensorsFile(source, config=config)
    if kind.endswith(TORCH):
        return lambda source: open_torch(source, config=config, allow_pickle=allow_pickle)
    raise refuse(
        f"weights ending in {', '.join((*SAFETENSORS, *TORCH, *GGUF))} or a directory with {METADATA}", file[:120]
    )
