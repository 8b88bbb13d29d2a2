"""Files written by `torch.save`: state dicts, bare or inside what training scripts save around them."""

import warnings

from jaxtyping import Shaped
from torch import Tensor, nn

from ...errors import missing
from ...records import Json
from ..base import Checkpoint, Entry, Rows
from ..bytes import ByteSource
from .archive import load_trusted, open_archive
from .pickles import CodeRefusal
from .tensors import View
from .tree import find_settings, find_weights


class TorchFile(Checkpoint):
    """Tensors of one file, each read when it is asked for."""

    format = "torch"

    def __init__(self, source: ByteSource, *, config: Json) -> None:
        self.archive = open_archive(source)
        self.views = find_weights(self.archive.tree, View)
        entries = {name: view.entry for name, view in self.views.items()}
        check_any(entries, source)
        super().__init__(entries, config=config or find_settings(self.archive.tree), place=source.name)

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        return self.archive.read(self.views[name], rows)

    def close(self) -> None:
        self.archive.source.close()


class LoadedFile(Checkpoint):
    """A file whose code was run at the user's word; all of it is in memory."""

    format = "torch"

    def __init__(self, source: ByteSource, *, config: Json) -> None:
        tree = load_trusted(source)
        tree = tree.state_dict() if isinstance(tree, nn.Module) else tree
        self.tensors = find_weights(tree, Tensor)
        entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}
        check_any(entries, source)
        super().__init__(entries, config=config or find_settings(tree), place=source.name)

    def fetch(self, name: str, rows: Rows | None) -> Shaped[Tensor, "..."]:
        tensor = self.tensors[name].detach()
        return (tensor if rows is None else tensor[rows[0] : rows[1]]).clone()


def open_torch(source: ByteSource, *, config: Json, allow_pickle: bool) -> Checkpoint:
    """The weights of a file. A pickle that needs code is refused, nothing of it executed, unless that is allowed."""
    try:
        return TorchFile(source, config=config)
    except CodeRefusal as cause:
        if allow_pickle:
            warnings.warn(f"{source.name}: its code is run, as allow_pickle says", stacklevel=2)
            return LoadedFile(source, config=config)
        remedy = "if you trust its author, pass allow_pickle=True (--allow-pickle); better, convert it to safetensors"
        raise CodeRefusal(f"{cause}; {remedy}") from None


def check_any(entries: dict[str, Entry], source: ByteSource) -> None:
    if not entries:
        raise missing(f"tensors by name in {source.name}", "save a state dict")
