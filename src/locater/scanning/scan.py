"""`scan`: every head of a model, stored or live, with its spectrum, regime and localisation, one layer at a time."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from ..behaviour import RANDOM_WEIGHTS, Told, describe_estimates, describe_theory, look_random
from ..errors import Refusal, counted, net, refusal
from ..models import AttentionModule, read_heads
from ..models.sources import Source, as_source
from ..records import Json, data_frame
from ..report.shown import Shown
from ..theory.random_walk import check_length, check_temperature
from . import DEFAULT_LENGTH
from .direct import direct_of
from .layer import Analysis, Settings, Workers, analyse, distances, joined, workers
from .rows import HeadRow, in_order
from .source import open_source

if TYPE_CHECKING:
    import pandas

Progress = Callable[[int, int], None]  # attention modules done, and in all
NORMALISED = (
    "queries or keys are normalised: tr W, η, ξ describe W after that norm, so the scale of the weights cancels "
    "(--spectrum raw: as stored)"
)
Detail = Literal["eigenvalues", "curves"]


@dataclass(frozen=True, repr=False)
class Scan(Shown):
    """All heads of one model; `coverage` says whether any layer is missing, `refused` which heads could not be read."""

    source: str
    family: str
    format: str
    coverage: str
    heads: tuple[HeadRow, ...]
    refused: tuple[str, ...] = ()
    length: int = DEFAULT_LENGTH
    normalised: bool = False  # moments are of the form behind QK-norm or an inner norm, not of the weights

    def to_json(self) -> Json:
        """The document that `locater scan --json` writes."""
        refused = {"refused": list(self.refused)} if self.refused else {}
        return {
            "schema": "locater.scan/1",
            "source": self.source,
            "family": self.family,
            "format": self.format,
            "coverage": self.coverage,
            "length": self.length,
            **({"normalised": True} if self.normalised else {}),
            **({"distances": distances(self.length)} if any(row.curves for row in self.heads) else {}),
            **refused,
            "heads": [row.to_json() for row in self.heads],
        }

    def to_frame(self) -> "pandas.DataFrame":
        """A pandas DataFrame, a row per head."""
        return data_frame([row.to_record() for row in self.heads])

    def summary(self) -> str:
        """The findings in plain words: behaviour first, the theory last."""
        lines = [
            f"{self.source}: {self.family}, {counted(len(self.heads), 'head')}, {self.coverage}",
            *(told.sentence for told in self.behaviour()),
            *describe_theory(row.regime for row in self.heads),
            *([NORMALISED] if self.normalised else []),
            *(f"not read: {sentence}" for sentence in self.refused),
        ]
        return "\n".join(lines)

    def behaviour(self) -> list[Told]:
        """Describe what the heads probably do, by the estimate, and whom to look at first; or that W looks random."""
        rows = self.heads
        is_random = look_random([(row.trace, row.frobenius_squared, row.d_model) for row in rows])
        masses, intervals = (
            [getattr(row, name) for row in rows] for name in ("estimated_near_mass", "estimated_near_mass_interval")
        )
        told = describe_estimates([row.place for row in rows], masses, intervals)
        return [*([Told(RANDOM_WEIGHTS, ())] if is_random else []), *told]


def scan(
    source: Source,
    *,
    layers: Iterable[int] | None = None,
    length: int = DEFAULT_LENGTH,
    temperature: float | None = None,
    raw: bool = False,
    details: Collection[Detail] = (),
    progress: Progress | None = None,
) -> Scan:
    """Scan a checkpoint (directory, file, hub id, address) or a live module, holding one layer's weights at a time.

    Options of reading go with the source: `Stored(place, adapter=…)`, `Live(module, sample=…)`; see `locater.heads`.
    `raw` leaves the input norm's gain out of the weights. `temperature` replaces each head's own λ. Cost: three
    d_h×d×d_h products per head. Of the `details`, "eigenvalues" adds those of one d_h×d_h matrix, and their `spread`;
    "curves" keeps ρ and the expected logit of every head for pictures.
    """
    if unknown := {*details} - {*get_args(Detail)}:
        raise refusal(f"details among {', '.join(get_args(Detail))}", ", ".join(sorted(unknown)))
    kept = "eigenvalues" in details, "curves" in details
    temperature = None if temperature is None else check_temperature(temperature, 1)
    settings = Settings(check_length(length), temperature, raw, *kept)
    with open_source(as_source(source)) as opened:
        settings = replace(settings, num_layers=opened.num_layers)
        if opened.tensors is not None:
            settings = replace(settings, direct=direct_of(opened.tensors, opened.config))
        with net(opened.source):
            modules = opened.wanted(layers)
        whole = _analyse(opened.source, modules, settings, progress)
    rows = tuple(in_order(whole.rows))
    facts = opened.source, opened.family, opened.format, str(opened.coverage())
    return Scan(*facts, rows, tuple(whole.refused), settings.length, whole.normalised)


def _analyse(
    source: str, modules: Sequence[AttentionModule], settings: Settings, progress: Progress | None
) -> Analysis:
    """One layer after the other; refused where nothing is left."""

    def parts(threads: Workers) -> Iterator[Analysis]:
        for done, module in enumerate(modules):
            if progress:
                progress(done, len(modules))
            with net(source):
                # Handed on without a name of its own: one layer's weights are freed before the next are read.
                part = _analyse_layer(read_heads(module), settings, threads)
            yield from part

    with workers() as threads:
        whole = joined(parts(threads))
    if not whole.rows:
        raise Refusal(whole.refused[0])
    return whole


def _analyse_layer(layer: AttentionModule, settings: Settings, threads: Workers) -> tuple[Analysis, Analysis]:
    return Analysis(refused=list(layer.refused)), analyse(layer.heads, settings, threads)
