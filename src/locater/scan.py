"""`scan`: every head of a model, stored or live, with its spectrum, regime and localisation, one layer at a time."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from torch import nn

from . import checkpoints
from .analysis import HeadRow, analyse
from .errors import Refusal, refuse
from .families import Config, Model, open_model, read_layout, spans

DEFAULT_LENGTH = 1024
Source = str | PathLike[str] | nn.Module
Progress = Callable[[int, int], None]  # attention modules done, and in all


@dataclass(frozen=True)
class Scan:
    """All heads of one model; `coverage` says whether any layer is missing, `refused` which heads could not be read."""

    source: str
    family: str
    format: str
    coverage: str
    heads: tuple[HeadRow, ...]
    refused: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document that `locater scan --json` writes."""
        return {
            "schema": "locater.scan/1",
            "source": self.source,
            "family": self.family,
            "format": self.format,
            "coverage": self.coverage,
            "refused": list(self.refused),
            "heads": [row.to_json() for row in self.heads],
        }

    def to_frame(self) -> Any:
        """A pandas DataFrame, a row per head."""
        try:
            import pandas
        except ImportError:
            raise refuse("pandas, for data frames", "none", 'install it with: pip install "locater[report]"') from None
        return pandas.DataFrame([row.to_json() for row in self.heads])

    def summary(self) -> str:
        """The findings in plain words."""
        from .findings import summarise

        return summarise(self)


def scan(
    source: Source,
    *,
    layers: Iterable[int] | None = None,
    length: int = DEFAULT_LENGTH,
    temperature: float | None = None,
    raw: bool = False,
    eigenvalues: bool = False,
    adapter: str | PathLike[str] | None = None,
    layout: str | PathLike[str] | None = None,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Scan:
    """Scan a checkpoint (directory, file, hub id, address) or a live module, holding one layer's weights at a time.

    `raw` leaves the input norm's gain out of the weights. `temperature` replaces each head's own λ. Cost: three
    d_h×d×d_h products and the eigenvalues of one d_h×d_h matrix per head.
    """
    with ExitStack() as stack:
        name, form, model = _open(source, stack, adapter=adapter, layout=layout, allow_pickle=allow_pickle)
        wanted = _wanted(model, layers)
        total = sum(len(wanted.intersection(places.layers)) for places in model.places)
        rows: list[HeadRow] = []
        refused: list[str] = []
        for done, layer in enumerate(model.layers(wanted)):
            if progress:
                progress(done, total)
            refused += layer.refused
            rows += analyse(layer.heads, length=length, temperature=temperature, raw=raw, keep_eigenvalues=eigenvalues)
    if not rows:
        raise Refusal(refused[0])
    return Scan(name, model.family, form, model.coverage, tuple(sorted(rows, key=HeadRow.order)), tuple(refused))


def _open(source: Source, stack: ExitStack, *, adapter: Any, layout: Any, allow_pickle: bool) -> tuple[str, str, Model]:
    """The source's name, its format, and the model in it."""
    family = None if layout is None else read_layout(layout)
    if isinstance(source, nn.Module):
        from . import modules

        return type(source).__name__, "module", modules.open_module(source, family=family)
    checkpoint = stack.enter_context(checkpoints.open(source, adapter=adapter, allow_pickle=allow_pickle))
    return fspath(source), checkpoint.format, open_model(Config(checkpoint.config), checkpoint, family=family)


def _wanted(model: Model, layers: Iterable[int] | None) -> frozenset[int]:
    known = frozenset(layer for places in model.places for layer in places.layers)
    if layers is None:
        return known
    wanted = frozenset(layers)
    if not wanted <= known:
        raise refuse(f"layers among {spans(sorted(known))}", spans(sorted(wanted - known)))
    return wanted
