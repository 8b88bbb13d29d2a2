"""Models to read, each with the options that its kind has: files, and live modules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from torch import Tensor, nn

from ..errors import mask_secrets

Place = str | PathLike[str]


@dataclass(frozen=True)
class Stored:
    """A checkpoint: directory, file, hub id, address or pip:PACKAGE.

    `adapter` is a LoRA adapter on top of it, `layout` a file that describes a model of no known family. `allow_pickle`
    loads pickles that run code; `timeout` is the number of seconds after which files from elsewhere are given up.
    """

    place: Place
    adapter: Place | None = None
    layout: Place | None = None
    allow_pickle: bool = False
    timeout: float | None = None

    @property
    def name(self) -> str:
        return mask_secrets(fspath(self.place))


@dataclass(frozen=True, eq=False)
class Live:
    """A module, and how its heads are found where no table knows its family.

    It is run once on `sample`, a batch as it takes them; or its projections are named by `heads`, one entry per layer:
    (query, key, num_heads, num_key_heads) or (fused, num_heads, num_key_heads). `causal` says what named heads see, and
    `layout` is a file that describes the model.
    """

    module: nn.Module
    sample: Tensor | Mapping[str, Any] | Sequence[Any] | None = None
    heads: Sequence[Any] = ()
    causal: bool | None = None
    layout: Place | None = None

    @property
    def name(self) -> str:
        return type(self.module).__name__


Source = Place | nn.Module | Stored | Live


def as_source(source: Source) -> Stored | Live:
    """Take a path for a checkpoint without options, and a module for a live one."""
    if isinstance(source, Stored | Live):
        return source
    return Live(source) if isinstance(source, nn.Module) else Stored(source)
