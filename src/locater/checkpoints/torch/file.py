"""Files written by `torch.save`: state dicts, bare or inside what training scripts and wrappers put around them."""

import re
import warnings
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, TypeVar

from jaxtyping import Shaped
from torch import Tensor

from ...budget import budget
from ...errors import missing
from ...records import Json
from ..base import Checkpoint, Entry, Rows
from ..bytes import ByteSource
from .archive import load_trusted, open_archive
from .pickles import CodeRefusal, Strided

Leaf = TypeVar("Leaf")

WRAPPERS = ("model_state_dict", "state_dict", "model", "module", "model_state", "app")
SETTINGS = ("model_args", "config", "hyper_parameters", "hparams", "dims")
INNER_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
OUTER_PREFIX = "module."
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
        entries = {name: _entry(leaf) for name, leaf in self.leaves.items()}
        super().__init__(entries, config=config or find_settings(tree), place=source.name, parts=[source])

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        leaf = self.leaves[name]
        if self.archive is not None and isinstance(leaf, Strided):
            return self.archive.read(leaf, rows)
        assert isinstance(leaf, Tensor)
        return (leaf.detach() if rows is None else leaf.detach()[rows[0] : rows[1]]).clone()


def _entry(leaf: Strided | Tensor) -> Entry:
    return leaf.entry if isinstance(leaf, Strided) else Entry(tuple(leaf.shape), leaf.dtype)


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
    return next((tree[key] for key in WRAPPERS if _holds(tree, key, kind)), None)


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
    cleaned = {_without_wrappers(name): tensor for name, tensor in tensors.items()}
    if cleaned and all(name.startswith(OUTER_PREFIX) for name in cleaned):
        cleaned = {name.removeprefix(OUTER_PREFIX): tensor for name, tensor in cleaned.items()}
    return cleaned if len(cleaned) == len(tensors) else tensors


def _without_wrappers(name: str) -> str:
    for prefix in INNER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _holds(tree: object, key: str, kind: type) -> bool:
    return isinstance(tree, Mapping) and isinstance(tree.get(key), Mapping) and any(_flatten(tree[key], kind))


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
