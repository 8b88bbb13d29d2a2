"""The heads of one layer, as rows: taken in chunks of one shape by several threads, so that memory stays bounded."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import Refusal, refusal
from ..head import Head
from ..positions import Rotary
from ..spectra import Grams, Moments, largest_singular_value, moments_of, spread
from ..theory import closed_form, regimes
from ..theory.rotary import Series
from .bounds import Biases, folded_biases, logit_bounds
from .curves import curves_of
from .curves import positions as positions_of
from .direct import Direct, DirectInputs, nothing, wanted_queries
from .estimate import direct_into, estimates
from .products import Linear, chunks, products, products_and_queries
from .rows import HeadRow

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_WORKERS = 4  # each has a buffer of its own, and memory is bounded


class Workers:
    """`count` threads, each of which runs torch without threads of its own; with one, all is done in place."""

    def __init__(self, pool: ThreadPoolExecutor | None, count: int) -> None:
        self.pool, self.count = pool, count

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        return list((self.pool.map if self.pool else map)(function, items))


ALONE = Workers(None, 1)


@contextmanager
def workers() -> Iterator[Workers]:
    """As many as torch has threads, within bounds; torch gets its threads back afterwards."""
    threads = torch.get_num_threads()
    count = min(threads, MOST_WORKERS)
    if count == 1:
        yield ALONE
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield Workers(pool, count)
    finally:
        torch.set_num_threads(threads)


# Positions at which a profile is evaluated: enough to tell its shape, and bounded for any length. With rotary positions
# each costs d_h² per head.
NUM_POSITIONS, NUM_ROTARY_POSITIONS = 256, 64


@dataclass(frozen=True)
class Analysis:
    """The rows of some heads; a head whose numbers overflow is a sentence in `refused`, the others are still there."""

    rows: list[HeadRow] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    normalised: bool = False  # some rows are of the form behind a norm of queries or keys


@dataclass(frozen=True)
class Settings:
    """What is asked of every head: `temperature` replaces its own λ, `raw` leaves the input norm's gain out."""

    length: int
    temperature: float | None = None
    raw: bool = False
    keep_eigenvalues: bool = False
    keep_curves: bool = False
    exact: bool = False
    direct: Direct = nothing  # what embeddings and positions alone make of a text
    num_layers: int = 0  # of the whole model

    def temperature_of(self, head: Head) -> float:
        return head.temperature if self.temperature is None else self.temperature


def analyse(heads: Sequence[Head], settings: Settings, workers: Workers = ALONE) -> Analysis:
    """The spectrum and the profile of every head, in order. Cost: three d_h×d×d_h products per head."""
    parts = chunks(heads, parts=workers.count)
    return joined(workers.map(partial(_analyse_chunk, settings=settings), parts))


def _analyse_chunk(groups: list[list[Head]], *, settings: Settings) -> Analysis:
    heads = [head for group in groups for head in group]
    try:
        return Analysis(_rows(groups, settings))
    except Refusal as reason:
        if len(heads) > 1:  # find out which of them it is
            return joined([_analyse_chunk([[head]], settings=settings) for head in heads])
        return Analysis([], [f"{heads[0].label}: {reason}"])


def joined(parts: Iterable[Analysis]) -> Analysis:
    """All of them as one, taken as they come: no part is held."""
    whole, normalised = Analysis(), False
    for part in parts:
        whole.rows.extend(part.rows)
        whole.refused.extend(part.refused)
        normalised |= part.normalised
    return replace(whole, normalised=normalised)


def _rows(stored: list[list[Head]], settings: Settings) -> list[HeadRow]:
    groups = [[head.anywhere() for head in group] for group in stored]
    # Behind a norm of queries and keys the weights' own scale is lost: the spectrum is that of the normalised form.
    is_linear = settings.raw or all(side.is_linear for side in (groups[0][0].query, groups[0][0].key))
    biases = folded_biases(groups) if is_linear and not settings.raw else []
    inputs = None if settings.raw else direct_into(groups, settings.direct)
    x = None if inputs is None else wanted_queries([head for group in groups for head in group], inputs)
    linear = None if is_linear else Linear(raw=False)
    grams, queries = products_and_queries(groups, x, raw=settings.raw, linear=linear)
    queries = None if x is None else _with_biases(queries, biases)
    spectrum = moments_of(grams, d_model=groups[0][0].d_model)
    sigma = largest_singular_value(grams)
    values = _eigenvalues(grams.core).flatten(0, 1) if settings.keep_eigenvalues else None
    profiles = _profiles(groups, grams, spectrum, settings)
    columns = _columns(spectrum) | _estimated(groups, grams, settings, inputs, queries)
    columns |= {
        "spread": [None] * len(sigma.flatten()) if values is None else spread(values, spectrum.d_model).tolist(),
        "localisation": regimes.localisation(profiles).tolist(),
        "regime": regimes.classify_all(profiles),
        "sigma": sigma.flatten().tolist(),
        "logit_bound": _bounds(stored, grams, sigma, biases, settings),
    }
    _check_finite(columns)
    heads = [head for group in groups for head in group]
    pairs = [None] * len(heads) if values is None else _pairs(values)
    curves = curves_of(groups, grams, spectrum, profiles, settings) if settings.keep_curves else [None] * len(heads)
    cells = (dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))
    return [
        HeadRow(
            block=head.block,
            layer=head.layer,
            head=head.index,
            key_head=head.index if head.key_index is None else head.key_index,
            d_model=head.d_model,
            d_head=head.d_head,
            temperature=settings.temperature_of(head),
            eigenvalues=own_pairs,
            curves=own_curves,
            **own_cells,
        )
        for head, own_pairs, own_curves, own_cells in zip(heads, pairs, curves, cells, strict=True)
    ]


def _check_finite(columns: dict[str, list]) -> None:
    """Finite weights can have moments that are not; a result with infinity in it is no result."""
    for name, cells in columns.items():
        if any(isinstance(cell, float) and not math.isfinite(cell) for cell in cells):
            raise refusal(f"a finite {name.replace('_', ' ')}", "NaN or infinity", "the weights are too large")


def _bounds(
    groups: list[list[Head]], grams: Grams, sigma: Tensor, biases: Biases, settings: Settings
) -> list[float | None]:
    """None for weights as stored: what multiplies them between the norm and the logit is left out there."""
    if settings.raw:
        return [None for group in groups for _ in group]
    return logit_bounds(groups, grams, sigma, biases, temperature=settings.temperature_of(groups[0][0]))


def _eigenvalues(core: Tensor) -> Tensor:
    try:
        return torch.linalg.eigvals(core)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        raise refusal("a core whose eigenvalues can be computed", "one that does not converge") from None


def _with_biases(queries: Tensor, biases: Biases) -> Tensor:
    """The products leave biases out."""
    if all(own is None for own, _ in biases):
        return queries
    none = queries.new_zeros(queries.shape[1])
    return queries + torch.stack([none if own is None else own.to(none) for own, _ in biases])[..., None]


def _estimated(
    groups: list[list[Head]], grams: Grams, settings: Settings, inputs: DirectInputs | None, queries: Tensor | None
) -> dict[str, list]:
    """What the heads probably do; nothing is said of weights without their gains."""
    num_heads = sum(map(len, groups))
    num_layers = settings.num_layers
    found = [None] * num_heads if settings.raw else estimates(groups, grams, inputs, queries, num_layers=num_layers)
    found = [one if one is not None and math.isfinite(one.near_mass) else None for one in found]
    return {
        "estimated_near_mass": [one and one.near_mass for one in found],
        "estimated_near_mass_interval": [one and one.interval for one in found],
    }


def _profiles(groups: list[list[Head]], grams: Grams, spectrum: Moments, settings: Settings) -> Tensor:
    """ρ over the context for every head of a chunk, by the closed form, with its positions and norms."""
    head = groups[0][0]
    if settings.raw and not (head.query.is_linear and head.key.is_linear):
        grams = products(groups, raw=True, linear=Linear(raw=True))
        spectrum = moments_of(grams, d_model=head.d_model)
    temperature = settings.temperature_of(head)
    if head.rotary is None:
        positions = positions_of(settings.length, NUM_POSITIONS)
        shift = _shift(groups, settings.length, positions)
        profile = closed_form.at(
            positions.double(), spectrum, length=settings.length, temperature=temperature, shift=shift
        )
        return profile.flatten(0, 1)
    series, pairs = _series(head.rotary, settings.length)
    return series.profile(grams, pairs=pairs, temperature=temperature).flatten(0, 1)


@lru_cache(maxsize=8)
def _series(rotary: Rotary, length: int) -> tuple[Series, Tensor]:
    """What the profiles of all heads with these positions share, and the pairs."""
    positions = positions_of(length, NUM_ROTARY_POSITIONS)
    return Series(length, positions, frequencies=rotary.frequencies(length)), rotary.pairs


def _shift(groups: list[list[Head]], length: int, positions: Tensor) -> Tensor | None:
    """What positions add to the logits of the last query (ALiBi, T5's buckets), less the mean over the context."""
    if groups[0][0].position_bias is None:
        return None
    distances = torch.arange(length - 1, -1, -1)[None]
    biases = [head.position_bias(distances).detach()[0] for group in groups for head in group if head.position_bias]
    bias = torch.stack(biases).double().unflatten(0, (len(groups), -1))
    return (bias - bias.mean(-1, keepdim=True))[..., positions - 1]


def _columns(spectrum: Moments) -> dict[str, list]:
    names = ("trace", "trace_of_square", "frobenius_squared", "mean", "variance", "mean_nonzero", "variance_nonzero")
    return {name: getattr(spectrum, name).flatten().tolist() for name in (*names, "xi", "eta", "symmetry")}


def _pairs(values: Tensor) -> list[tuple[tuple[float, float], ...]]:
    """Real and imaginary parts of each head, the largest first, so that equal spectra read alike."""
    order = values.abs().argsort(descending=True, stable=True)
    parts = torch.view_as_real(values.gather(-1, order))
    return [tuple(zip(*own, strict=True)) for own in parts.mT.tolist()]
