"""Weights spread over several files by an index: a JSON object whose `weight_map` gives the file of each name."""

from collections.abc import Callable, Mapping

from jaxtyping import Shaped
from torch import Tensor

from ..documents import check_beside
from ..errors import missing, refusal, within
from ..records import Json
from .base import Checkpoint, Entry, Rows
from .bytes import ByteSource, Folder, find_file, read_object

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
    return Sharded({name: opened[file] for name, file in weight_map.items()}, config=config, place=folder.place)


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
