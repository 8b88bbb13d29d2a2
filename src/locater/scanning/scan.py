"""`scan`: every head of a model, stored or live, with its spectrum, regime and localisation, one layer at a time."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from torch import nn

from .. import checkpoints
from ..errors import Refusal, refusal
from ..models import Config, Family, Layer, Model, live, open_model, read_layout, spans
from ..report.shown import Shown
from ..theory.random_walk import check_length, check_temperature
from . import DEFAULT_LENGTH
from .curves import distances
from .layer import Analysis, Settings, Workers, analyse, joined, workers
from .rows import HeadRow

Source = str | PathLike[str] | nn.Module
Progress = Callable[[int, int], None]  # attention modules done, and in all


@dataclass(frozen=True)
class Scan(Shown):
    """All heads of one model; `coverage` says whether any layer is missing, `refused` which heads could not be read."""

    source: str
    family: str
    format: str
    coverage: str
    heads: tuple[HeadRow, ...]
    refused: tuple[str, ...] = ()
    length: int = DEFAULT_LENGTH

    def to_json(self) -> dict[str, Any]:
        """The document that `locater scan --json` writes."""
        refused = {"refused": list(self.refused)} if self.refused else {}
        return {
            "schema": "locater.scan/1",
            "source": self.source,
            "family": self.family,
            "format": self.format,
            "coverage": self.coverage,
            "length": self.length,
            **({"distances": distances(self.length)} if any(row.curves for row in self.heads) else {}),
            **refused,
            "heads": [row.to_json() for row in self.heads],
        }

    def to_frame(self) -> Any:
        """A pandas DataFrame, a row per head."""
        try:
            import pandas
        except ImportError:
            raise refusal("pandas, for data frames", "none", 'install it with: pip install "locater[report]"') from None
        return pandas.DataFrame([row.to_record() for row in self.heads])

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
    curves: bool = False,
    exact: bool = False,
    adapter: str | PathLike[str] | None = None,
    layout: str | PathLike[str] | None = None,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Scan:
    """Scan a checkpoint (directory, file, hub id, address) or a live module, holding one layer's weights at a time.

    `raw` leaves the input norm's gain out of the weights. `temperature` replaces each head's own λ. Cost: three
    d_h×d×d_h products and the eigenvalues of one d_h×d_h matrix per head. `curves` keeps ρ and the expected logit of
    every head for pictures; `exact` adds ρ without the Gaussian approximation, which is slow (docs/report.md).
    """
    settings = Settings(check_length(length), _checked(temperature), raw, eigenvalues, curves, exact)
    family = None if layout is None else read_layout(layout)
    with ExitStack() as stack:
        if isinstance(source, nn.Module):
            opened = _open_live(source, family)
        else:
            checkpoint = stack.enter_context(checkpoints.open(source, adapter=adapter, allow_pickle=allow_pickle))
            opened = _open_stored(fspath(source), checkpoint, family)
        whole = _analyse(opened, _wanted(opened, layers), settings, progress)
    rows = tuple(sorted(whole.rows, key=HeadRow.order))
    return Scan(
        opened.source, opened.family, opened.format, opened.coverage, rows, tuple(whole.refused), settings.length
    )


@dataclass(frozen=True)
class _Opened:
    """A source before anything is read: what it is, the layer of each attention module, and how to read the wanted."""

    source: str
    family: str
    format: str
    coverage: str
    numbers: list[int]
    read: Callable[[frozenset[int]], Iterator[Layer]]


def _open_stored(source: str, checkpoint: checkpoints.Checkpoint, family: Family | None) -> _Opened:
    model = open_model(Config(checkpoint.config), checkpoint, family=family)
    return _of_model(model, source, checkpoint.format)


def _open_live(module: nn.Module, family: Family | None) -> _Opened:
    """By the table of its family where its config names one, else by the kinds of its modules."""
    name, config = type(module).__name__, Config(live.settings(module))
    if family is not None or config.get("model_type") is not None:
        return _of_model(open_model(config, live.ModuleTensors(module), family=family), name, "module")
    sites = live.sites(module)
    missing = [site.query_name for site in sites if site.num_heads == 0]
    coverage = f"PARTIAL: {len(sites) - len(missing)} of {len(sites)} modules, without {', '.join(missing)}"

    def read(wanted: frozenset[int]) -> Iterator[Layer]:
        return (site.build() for site in sites if site.number in wanted)

    numbers = [site.number for site in sites]
    return _Opened(name, "modules", "module", coverage if missing else "COMPLETE", numbers, read)


def _of_model(model: Model, source: str, form: str) -> _Opened:
    numbers = [layer for places in model.places for layer in places.layers]
    return _Opened(source, model.family, form, model.coverage, numbers, model.layers)


def _analyse(opened: _Opened, wanted: frozenset[int], settings: Settings, progress: Progress | None) -> Analysis:
    """One layer after the other; refused where nothing is left."""
    layers, total = opened.read(wanted), sum(number in wanted for number in opened.numbers)

    def parts(threads: Workers) -> Iterator[Analysis]:
        for done in range(total):
            if progress:
                progress(done, total)
            # Handed on without a name of its own: one layer's weights are let go before the next are read.
            yield from _of_layer(next(layers), settings, threads)

    with workers() as threads:
        whole = joined(parts(threads))
    if not whole.rows:
        raise Refusal(whole.refused[0])
    return whole


def _of_layer(layer: Layer, settings: Settings, threads: Workers) -> tuple[Analysis, Analysis]:
    return Analysis(refused=list(layer.refused)), analyse(layer.heads, settings, threads)


def _wanted(opened: _Opened, layers: Iterable[int] | None) -> frozenset[int]:
    known = frozenset(opened.numbers)
    if layers is None:
        return known
    wanted = frozenset(layers)
    if not wanted or not wanted <= known:
        raise refusal(f"layers among {spans(sorted(known))}", spans(sorted(wanted - known)) or "none")
    return wanted


def _checked(temperature: float | None) -> float | None:
    return None if temperature is None else check_temperature(temperature, 1)
