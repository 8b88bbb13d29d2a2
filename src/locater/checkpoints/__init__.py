"""Stored weights of any common kind, opened by one call and read one tensor at a time.

A user names a directory, a file, a hub id or an address. Formats, and what reads far weights, are imported when a
source has them: `locater scan` should start soon.
"""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from ..errors import failed, refusal, within
from ..packages import PREFIX, packaged
from ..records import Json, check_beside
from .base import QUANTISATION, Checkpoint, Entry
from .bytes import ByteSource, Folder, LocalFolder, find_file, read_model_config
from .safetensors import SafetensorsFile
from .sharded import (
    ADAPTER,
    GGUF,
    INDEX,
    METADATA,
    SAFETENSORS,
    TORCH,
    WEIGHTS,
    choose,
    found_in,
    has_adapter,
    join_files,
    open_index,
)

__all__ = ["Checkpoint", "Entry", "open"]

Source = str | os.PathLike[str]


def open(source: Source, *, adapter: Source | None = None, allow_pickle: bool = False) -> Checkpoint:
    """The weights at a directory, a file, a hub id or an address; with `adapter`, a LoRA merged into them on reading.

    Costs the headers. Fails, in one sentence, on anything damaged, missing or not admitted; a pickle that asks for
    code to run is refused unless `allow_pickle` says that its author is trusted, which holds for `source` alone. The
    directory of an adapter alone opens the base that it names, if that is a directory or a hub id.
    """
    if adapter is None:
        return _open_plain(source, allow_pickle=allow_pickle)
    with within(os.fspath(adapter)):
        folder, _ = locate(adapter)
    base = _open_plain(source, allow_pickle=allow_pickle, is_base=True)
    with within(os.fspath(adapter)):
        return _adapted(base, folder, allow_pickle=False)


def _adapted(base: Checkpoint, folder: Folder, *, allow_pickle: bool) -> Checkpoint:
    from .adapter import Adapted, find_adapter

    settings, source = find_adapter(folder)
    return Adapted(base, _reader(source.name, {}, allow_pickle=allow_pickle)(source), settings)


def _open_plain(source: Source, *, allow_pickle: bool, is_base: bool = False) -> Checkpoint:
    with within(os.fspath(source)):
        folder, file = locate(source)
        if file is None and not is_base and has_adapter(folder):
            return _open_adapter_alone(folder, allow_pickle=allow_pickle)
        return _dequantised(_open_files(folder, file, allow_pickle=allow_pickle))


def _dequantised(store: Checkpoint) -> Checkpoint:
    """The checkpoint itself where its config says nothing of codes and its numbers have 16 bits or more."""
    parts = (part for part in (store.config, store.config.get("text_config")) if isinstance(part, Mapping))
    is_stated = any(part.get(key) for part in parts for key in QUANTISATION)
    kinds = {entry.dtype for entry in store.entries.values()}
    if not is_stated and all(kind.is_floating_point and kind.itemsize >= 2 for kind in kinds):
        return store
    from .quantised import dequantised

    return dequantised(store)


def _open_adapter_alone(folder: Folder, *, allow_pickle: bool) -> Checkpoint:
    """Open the base that an adapter's settings name, and merge the adapter into it."""
    from .adapter import read_adapter_settings

    if weights := found_in(folder):
        remedy = f"name {weights[0][:80]} for these weights alone, or name the adapter too (--adapter)"
        raise refusal("weights or an adapter, not both in one place", f"{ADAPTER} next to {weights[0][:80]}", remedy)
    settings = read_adapter_settings(folder) or {}
    name, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(name, str) or not (is_hub_id(name) or LocalFolder.is_one(name)):
        # An address here would be untrusted: it could lead to anything, by any protocol.
        expected = f"a directory or a hub id as the base in {ADAPTER}"
        raise refusal(expected, f"{name!r:.80}", "name base and adapter both")
    # On the hub the base is what it was trained on, not what it has become.
    base_folder, _ = locate(f"{name}@{revision}" if revision and not LocalFolder.is_one(name) else name)
    if has_adapter(base_folder):
        raise refusal("a base without an adapter of its own", f"{ADAPTER} in {name[:80]}", "name base and adapter both")
    # That pickles are allowed is said of the adapter, not of what it names.
    base = _open_files(base_folder, None, allow_pickle=False)
    return _adapted(_dequantised(base), folder, allow_pickle=allow_pickle)


def _open_files(folder: Folder, file: str | None, *, allow_pickle: bool) -> Checkpoint:
    """The file that the user names, or that the config names as transformers lets it, or the usual ones."""
    config = read_model_config(folder)
    named = None if file else config.get("transformers_weights")
    files = [file] if file else choose(folder) if named is None else [check_beside(named, "config.json")]
    first = find_file(folder, files[0])
    if files[0].endswith(METADATA):
        from .distributed import Distributed

        return Distributed(folder, first, config=config)
    if files[0].endswith(GGUF):
        from .gguf import open_gguf

        return open_gguf(folder, files, config=config)
    open_one = _reader(files[0], config, allow_pickle=allow_pickle)
    if files[0].endswith(INDEX):
        return open_index(folder, first, open_shard=open_one, config=config)
    if len(files) > 1:
        return join_files(folder, files, open_shard=open_one, config=config)
    return open_one(first)


def _reader(file: str, config: Json, *, allow_pickle: bool) -> Callable[[ByteSource], Checkpoint]:
    kind = file.removesuffix(INDEX)
    if kind.endswith(SAFETENSORS):
        return lambda source: SafetensorsFile(source, config=config)
    if kind.endswith(TORCH):
        from .torch import open_torch

        return lambda source: open_torch(source, config=config, allow_pickle=allow_pickle)
    known = (*SAFETENSORS, *TORCH, *GGUF)
    raise refusal(f"weights ending in {', '.join(known)} or a directory with {METADATA}", file[:120])


# ---------------------------------------------------------------------------------------- from a name to its folder
def locate(source: str | os.PathLike[str]) -> tuple[Folder, str | None]:
    """The folder, and the file in it if the source names one. What lies on disk wins over a hub id."""
    text = os.fspath(source)
    if text.startswith(PREFIX):
        text = packaged(text)
    if "://" in text:
        from .remote import locate_address

        return locate_address(text)
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return LocalFolder(path), None
        if path.is_file():
            return LocalFolder(path.parent), path.name
        exists = path.exists()
    except (OSError, ValueError) as cause:  # a name too long, or with a null byte
        raise refusal("a path or a hub id", f"{text!r:.120} ({cause})") from None
    if exists:
        raise refusal("a file or a directory", f"{text}, which is neither")
    if not is_hub_id(text):
        raise failed("open it", "no such file or folder", _meant(path))
    from .remote import locate_hub

    return locate_hub(text), None


def _meant(path: Path) -> str:
    """Suggest a similar name in the folder where the path was looked for."""
    parts = list(path.parts)
    for at in range(len(parts)):
        before, name = Path(*parts[:at]), parts[at]
        if not (before / name).exists():
            with suppress(OSError):
                if near := get_close_matches(name, [one.name for one in before.iterdir()], n=1):
                    return f"did you mean {before / near[0]}?"
            break
    return "check the spelling"


def is_hub_id(text: str) -> bool:
    """Tell an id, `name` or `owner/name` and perhaps `@revision`, from what was meant as a path."""
    name = text.partition("@")[0]
    is_one = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None
    return is_one and not name.endswith((*WEIGHTS, INDEX, ".json"))
