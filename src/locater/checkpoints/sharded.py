"""Files of a folder that are opened together: which they are, and several as one, by an index or by their names."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from jaxtyping import Shaped
from torch import Tensor

from ..errors import missing, refusal, within
from ..records import Json, check_beside
from .base import Checkpoint, Entry, Rows
from .bytes import ByteSource, Folder, LocalFolder, find_file, read_object

SAFETENSORS = (".safetensors",)
TORCH = (".bin", ".pt", ".pth", ".ckpt")
GGUF = (".gguf",)
WEIGHTS = SAFETENSORS + TORCH + GGUF
INDEX = ".index.json"
METADATA = ".metadata"
ADAPTER = "adapter_config.json"
# Weights of other frameworks, which nothing here reads.
FOREIGN = {
    ".msgpack": "Flax",
    "_CHECKPOINT_METADATA": "Orbax",
    ".keras": "Keras",
    ".h5": "Keras",
    ".tf_checkpoint": "TensorFlow",
}

# Tried by name where a place cannot list its files, in the order of transformers: beside a whole file an index is old.
USUAL = ("model.safetensors", "model.safetensors" + INDEX, "pytorch_model.bin", "pytorch_model.bin" + INDEX, METADATA)
# What trainers leave beside the weights.
OTHER = re.compile(r"^(training_args|optimizer|scheduler|scaler|rng_state.*|random_states.*|adapter_model)\.")
PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)$")

OpenShard = Callable[[ByteSource], Checkpoint]


class Sharded(Checkpoint):
    """Several checkpoints as one; each name is read from the shard that has it."""

    def __init__(self, shards: Mapping[str, Checkpoint], *, config: Json, place: str) -> None:
        self.shards = shards
        self.format = next(iter(shards.values())).format
        entries: dict[str, Entry] = {name: shard.entries[name] for name, shard in shards.items()}
        super().__init__(entries, config=config, place=place, parts=shards.values())
        distinct = dict.fromkeys(shards.values())
        self.metadata = {key: value for shard in distinct for key, value in shard.metadata.items()}

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        return self.shards[name].read(name, rows)


def open_index(folder: Folder, index: ByteSource, *, open_shard: OpenShard, config: Json) -> Sharded:
    """All shards that the index names, each opened once; fails on a shard or a tensor that is missing."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refusal(f"a weight_map of names to files in {index.name}", f"{weight_map!r:.80}")
    files = dict.fromkeys(check_beside(file, index.name) for file in weight_map.values())
    opened = {file: _open_shard(folder, file, open_shard, f", which {index.name} names") for file in files}
    absent = [name for name, file in weight_map.items() if name not in opened[file].entries]
    if absent:
        what = f"{absent[0][:80]!r} in {weight_map[absent[0]]}, as {index.name} says ({len(absent)} missing in all)"
        raise missing(what, "fetch index and shards again, from one revision")
    unnamed = {name: shard for shard in opened.values() for name in shard.entries if name not in weight_map}
    named = {name: opened[file] for name, file in weight_map.items()}
    return Sharded(named | unnamed, config=config, place=folder.place)  # all of a file is loaded, named or not


def join_files(folder: Folder, files: list[str], *, open_shard: OpenShard, config: Json) -> Sharded:
    """Files that belong together without an index; fails when two hold the same name."""
    shards: dict[str, Checkpoint] = {}
    for file in files:
        shard = _open_shard(folder, file, open_shard)
        if twice := shards.keys() & shard.entries.keys():
            raise refusal(f"each tensor once in {folder.place}", f"{min(twice)[:80]!r} twice", "name one of the files")
        shards |= dict.fromkeys(shard.entries, shard)
    if not shards:
        raise missing(f"at least one tensor in {folder.place}")
    return Sharded(shards, config=config, place=folder.place)


def _open_shard(folder: Folder, file: str, open_shard: OpenShard, named: str = "") -> Checkpoint:
    source = find_file(folder, file, named)
    with within(file[:120]):
        return open_shard(source)


def choose(folder: Folder) -> list[str]:
    """The files to open together; refused where there are none."""
    found = found_in(folder)
    if not found:
        _check_foreign(folder, folder.files())
        what = f"weights in {folder.place} ({', '.join('*' + suffix for suffix in WEIGHTS)} or {METADATA})"
        raise missing(what, _inside(folder) or "name the directory or file that holds them")
    return found


def found_in(folder: Folder) -> list[str]:
    """The files to open together: safetensors before a distributed checkpoint before pickles before GGUF.

    What frameworks leave beside a distributed checkpoint (`common.pt`) is no model.
    """
    files = folder.files()
    if not files:
        return [name for name in USUAL if folder.find(name) is not None][:1]
    distributed = [METADATA] * (METADATA in files)
    groups = (distributed if kind is None else _choose_kind(files, kind) for kind in (SAFETENSORS, None, TORCH, GGUF))
    return next((group for group in groups if group), [])


def has_adapter(folder: Folder) -> bool:
    """Tell whether transformers would take the folder for an adapter, whatever else lies there."""
    return folder.find(ADAPTER) is not None


def _inside(folder: Folder) -> str:
    """Suggest folders with weights one level further in, as in the folder of a run."""
    if not isinstance(folder, LocalFolder):
        return ""
    with suppress(OSError):  # a folder that may not be looked into
        for inner in sorted(path for path in folder.path.iterdir() if path.is_dir()):
            if any(one.name.endswith(WEIGHTS) for one in inner.iterdir()):
                return f"there are weights in {inner}"
    return ""


def _check_foreign(folder: Folder, files: frozenset[str]) -> None:
    for name in sorted(files):
        kind = next((kind for end, kind in FOREIGN.items() if name.endswith(end)), None)
        if kind is not None:
            remedy = f"load it with {kind} and save its weights as safetensors"
            raise refusal(
                f"weights of PyTorch, safetensors or GGUF in {folder.place}", f"{name[:80]} of {kind}", remedy
            )


def _choose_kind(files: frozenset[str], suffixes: tuple[str, ...]) -> list[str]:
    """The usual name if it is there, else the only candidate, else the parts of one split file."""
    for usual in USUAL:
        if usual in files and usual.removesuffix(INDEX).endswith(suffixes):
            return [usual]
    indexes = sorted(name for name in files if name.endswith(tuple(suffix + INDEX for suffix in suffixes)))
    if len(indexes) == 1:
        return indexes
    weights = sorted(name for name in files if name.endswith(suffixes) and not OTHER.match(name))
    if len(weights) <= 1:
        return weights
    return complete_parts(weights[0], weights)


def complete_parts(first: str, files: list[str]) -> list[str]:
    """The files `stem-00001-of-0000N` that `files` consists of; fails when it holds others or lacks one."""
    part = PART.match(first)
    if part is None:
        raise refusal("one file of weights, or an index", f"{len(files)}, such as {', '.join(files[:3])}", "name one")
    count = int(part["count"])
    expected = [f"{part['stem']}-{number:05d}-of-{part['count']}{part['suffix']}" for number in range(1, count + 1)]
    if absent := [name for name in expected[: len(files) + 1] if name not in files]:
        raise refusal(f"all {count} parts of {part['stem']}", f"no {absent[0]}", "fetch it again")
    if len(files) != count:
        raise refusal("one file of weights, or an index", f"several, such as {files[0]} and {files[-1]}", "name one")
    return expected
