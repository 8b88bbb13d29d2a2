"""The heads of one layer, as rows: taken in batches of one kind by several threads, so that memory stays bounded."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..budget import check_memory
from ..errors import Refusal, refusal
from ..head import Head
from ..positions import Rotary
from ..spectra import Grams, Moments, largest_singular_value, moments_of, rotary_forms, rotation, spread
from ..theory import closed_form, regimes
from ..theory.closed_form import Series
from ..theory.random_walk import Turns
from .batch import HeadBatch, batches
from .direct import Direct, no_direct_path, wanted_queries
from .estimate import direct_into, estimate_near_mass
from .products import FoldedNorms, bound_logits, multiply
from .rows import HeadRow, make_rows

Curves = dict[str, dict[str, list[float]]]
MOMENTS = (
    *("trace", "trace_of_square", "frobenius_squared", "mean", "variance", "mean_nonzero", "variance_nonzero"),
    *("xi", "eta", "symmetry"),
)
NUM_POINTS = 64


def spaced_positions(length: int, most: int) -> Tensor:
    """Evenly from 1 to T."""
    return torch.linspace(1, length, min(length, most), dtype=torch.float64).round().long()


def distances(length: int) -> list[int]:
    """From 0, four to every doubling.

    >>> distances(9)
    [0, 1, 2, 3, 4, 5, 6, 7, 8]
    """
    powers = (round(2 ** (step / 4)) for step in range(4 * length.bit_length() + 1))
    return sorted({0, *(distance for distance in powers if distance < length)})


def curves_of(batch: HeadBatch, grams: Grams, found: Moments, profiles: Tensor, settings: "Settings") -> list[Curves]:
    """Every head of a batch: ρ without positions, ρ with them where there are any, and the expected logit."""
    first, length = batch.first, settings.length
    temperature = settings.temperature_of(first)
    at = spaced_positions(length, NUM_POINTS)
    closed = closed_form.at(at.double(), found, length=length, temperature=temperature).flatten(0, 1)
    drawn = {"closed": closed.tolist()}
    if first.rotary is not None or first.position_bias is not None:
        drawn["positions"] = profiles[:, spaced_positions(profiles.shape[1], NUM_POINTS) - 1].tolist()
    rows: list[Curves] = [{"profiles": dict(zip(drawn, own, strict=True))} for own in zip(*drawn.values(), strict=True)]
    if first.rotary is not None:
        logits = _expected_logits(first.rotary, grams, length) / temperature
        rows = [row | {"expected_logits": {"weights": own}} for row, own in zip(rows, logits.tolist(), strict=True)]
    return rows


def _expected_logits(rotary: Rotary, grams: Grams, length: int) -> Tensor:
    """tr W(Δ) of every head: the expected logit, times λ, of two tokens of one white content at distance Δ."""
    forms = rotary_forms(grams, rotary.pairs)
    terms = rotation(torch.tensor(distances(length), dtype=torch.float64), rotary.frequencies(length))
    traces = forms.trace.double() @ terms.mT
    return traces.expand(*grams.core.shape[:-2], -1).flatten(0, 1)


MOST_WORKERS = 4  # each has a buffer of its own, and memory is bounded


class Workers(NamedTuple):
    """`size` threads, each of which runs torch without threads of its own; with one, all is done in place."""

    map: Callable[..., Iterable[Any]]
    size: int


ALONE = Workers(map, 1)


@contextmanager
def workers() -> Iterator[Workers]:
    """Start as many workers as torch has threads, within bounds; torch gets its threads back afterwards."""
    threads = torch.get_num_threads()
    count = min(threads, MOST_WORKERS)
    if count == 1:
        yield ALONE
        return
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield Workers(pool.map, count)
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
    """Options for every head: `temperature` replaces its own λ, `raw` leaves the input norm's gain out."""

    length: int
    temperature: float | None = None
    raw: bool = False
    keep_eigenvalues: bool = False
    keep_curves: bool = False
    direct: Direct = no_direct_path  # what embeddings and positions alone make of a text
    num_layers: int = 0  # of the whole model

    def temperature_of(self, head: Head) -> float:
        return head.temperature if self.temperature is None else self.temperature


def analyse(heads: Sequence[Head], settings: Settings, workers: Workers = ALONE) -> Analysis:
    """The spectrum and the profile of every head, in order. Cost: three d_h×d×d_h products per head."""
    parts = batches(heads, parts=workers.size)
    return joined(workers.map(partial(_analyse_batch, settings=settings), parts))


def _analyse_batch(batch: HeadBatch, *, settings: Settings) -> Analysis:
    try:
        return Analysis(_rows(batch, settings), normalised=not (settings.raw or batch.is_linear))
    except Refusal as reason:
        if len(batch) > 1:  # find out which of them it is
            return joined(_analyse_batch(single, settings=settings) for single in batch.singles())
        return Analysis([], [f"{batch.first.label}: {reason}"])


def joined(parts: Iterable[Analysis]) -> Analysis:
    """All of them as one, taken as they come: no part is held."""
    whole, normalised = Analysis(), False
    for part in parts:
        whole.rows.extend(part.rows)
        whole.refused.extend(part.refused)
        normalised |= part.normalised
    return replace(whole, normalised=normalised)


@torch.no_grad()
def _rows(stored: HeadBatch, settings: Settings) -> list[HeadRow]:
    batch, raw = stored.anywhere(), settings.raw
    inputs = None if raw else direct_into(batch, settings.direct)
    x = None if inputs is None else wanted_queries(batch, inputs)
    # Behind a norm of queries and keys the weights' own scale is lost: the spectrum is that of the normalised form.
    linear = None if raw or batch.is_linear else FoldedNorms(raw=False)
    products = multiply(batch, x, raw=raw, linear=linear)
    grams, biases, queries = products.grams, products.biases, None if x is None else products.queries
    spectrum = moments_of(grams, d_model=batch.first.d_model)
    sigma = largest_singular_value(grams)
    profiles = _profiles(batch, grams, spectrum, settings)
    absent: list[None] = [None] * len(batch)
    values = _eigenvalues(grams.core).flatten(0, 1) if settings.keep_eigenvalues else None
    near, intervals = absent, absent
    if not raw:
        near, intervals = estimate_near_mass(batch, grams, biases, inputs, queries, num_layers=settings.num_layers)
    temperature = settings.temperature_of(batch.first)
    columns = {name: getattr(spectrum, name).flatten().tolist() for name in MOMENTS} | {
        "spread": absent if values is None else spread(values, spectrum.d_model).tolist(),
        "localisation": regimes.localisation(profiles).tolist(),
        "regime": regimes.classify_all(profiles),
        "sigma": sigma.flatten().tolist(),
        # Of weights as stored absent is bounded: what multiplies them between norm and logit is left out there.
        "logit_bound": absent if raw else bound_logits(stored, grams, sigma, biases, temperature=temperature),
        "estimated_near_mass": near,
        "estimated_near_mass_interval": intervals,
        "eigenvalues": absent if values is None else _pairs(values),
        "curves": curves_of(batch, grams, spectrum, profiles, settings) if settings.keep_curves else absent,
    }
    _check_finite(columns)
    return make_rows(batch.heads, columns, temperature=temperature)


def _check_finite(columns: dict[str, list]) -> None:
    """Finite weights can have moments that are not; a result with infinity in it is no result."""
    if all(map(math.isfinite, [cell for cells in columns.values() for cell in cells if isinstance(cell, float)])):
        return
    for name, cells in columns.items():
        if not all(map(math.isfinite, [cell for cell in cells if isinstance(cell, float)])):
            raise refusal(f"a finite {name.replace('_', ' ')}", "NaN or infinity", "the weights are too large")


def _eigenvalues(core: Tensor) -> Tensor:
    try:
        return torch.linalg.eigvals(core)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        raise refusal("a core whose eigenvalues can be computed", "one that does not converge") from None


def _profiles(batch: HeadBatch, grams: Grams, spectrum: Moments, settings: Settings) -> Tensor:
    """ρ over the context for every head of a batch, by the closed form, with its positions and norms."""
    head = batch.first
    if settings.raw and not batch.is_linear:
        grams = multiply(batch, raw=True, linear=FoldedNorms(raw=True)).grams
        spectrum = moments_of(grams, d_model=head.d_model)
    temperature = settings.temperature_of(head)
    if head.rotary is None:
        positions = spaced_positions(settings.length, NUM_POSITIONS)
        shift = _shift(batch, settings.length, positions)
        profile = closed_form.at(
            positions.double(), spectrum, length=settings.length, temperature=temperature, shift=shift
        )
        return profile.flatten(0, 1)
    return _series(head.rotary, settings.length).profile(grams, temperature=temperature).flatten(0, 1)


@lru_cache(maxsize=8)
def _series(rotary: Rotary, length: int) -> Series:
    """Compute the part of the profiles that all heads with these positions share."""
    turns = Turns(rotary.pairs, rotary.frequencies(length))  # the products have the amplitude
    return Series(length, spaced_positions(length, NUM_ROTARY_POSITIONS), turns)


def _shift(batch: HeadBatch, length: int, positions: Tensor) -> Tensor | None:
    """Compute the position bias on the last query's logits (ALiBi, T5's buckets), less its mean over the context."""
    check_memory(40 * length, f"the distances in {length:,} tokens")
    added = batch.added_by_distance(torch.arange(length - 1, -1, -1)[None])
    if added is None:
        return None
    bias = added[:, 0].double().unflatten(0, (batch.num_groups, -1))
    return (bias - bias.mean(-1, keepdim=True))[..., positions - 1]


def _pairs(values: Tensor) -> list[tuple[tuple[float, float], ...]]:
    """Real and imaginary parts of each head, the largest first, so that equal spectra read alike."""
    order = values.abs().argsort(descending=True, stable=True)
    parts = torch.view_as_real(values.gather(-1, order))
    return [tuple(zip(*own, strict=True)) for own in parts.mT.tolist()]
