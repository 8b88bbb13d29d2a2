"""Heads to rows: the spectrum of each head, and the regime that the theory reads off it.

Heads are taken in chunks of one shape, grouped keys together, so that products are batched and memory stays bounded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .heads import BLOCKS, Head
from .projections import Projection, widen
from .spectra import Grams, Moments, grams, moments_of, spread
from .theory import closed_form, regimes, rotary

# Weights that one batched product may hold in float32.
CHUNK_BYTES = 12 * 2**20
# Positions at which a rotary profile is evaluated: enough to tell its shape, and bounded for any length.
NUM_POSITIONS = 64


@dataclass(frozen=True)
class HeadRow:
    """One head of a scan: the moments of W = W_K^T W_Q, where `variance` may be negative and `spread` may not."""

    block: str
    layer: int
    head: int
    key_head: int
    d_model: int
    d_head: int
    temperature: float
    trace: float
    trace_of_square: float
    frobenius_squared: float
    mean: float
    variance: float
    mean_nonzero: float
    variance_nonzero: float
    spread: float
    xi: float
    eta: float
    localisation: float
    regime: str
    eigenvalues: tuple[tuple[float, float], ...] | None = None

    def order(self) -> tuple[int, int, int]:
        return BLOCKS.index(self.block), self.layer, self.head  # pyright: ignore[reportArgumentType]

    def to_json(self) -> dict[str, Any]:
        document = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.eigenvalues is None:
            del document["eigenvalues"]
        return document


def analyse(
    heads: Sequence[Head],
    *,
    length: int,
    temperature: float | None = None,
    raw: bool = False,
    keep_eigenvalues: bool = False,
) -> list[HeadRow]:
    """The rows of one layer's heads; `raw` takes the weights as stored, else the input norm's gain is folded in."""
    rows: list[HeadRow] = []
    for groups in _chunks(heads):
        chunk = [head for group in groups for head in group]
        products = _grams(groups, raw=raw)
        profiles = _profiles(groups, products, length=length, temperature=temperature, raw=raw)
        rows += _rows(chunk, products, profiles, temperature=temperature, keep_eigenvalues=keep_eigenvalues)
    return rows


def _chunks(heads: Sequence[Head]) -> Iterator[list[list[Head]]]:
    """Groups of heads that share a key, as many at a time as the budget and one common shape allow."""
    groups = [list(group) for _, group in groupby(heads, key=lambda head: id(head.key))]
    for _, alike in groupby(groups, key=lambda group: (len(group), group[0].d_head, group[0].d_model)):
        alike = list(alike)
        first = alike[0][0]
        at_once = max(1, CHUNK_BYTES // (4 * (len(alike[0]) + 1) * first.d_head * first.d_model))
        for start in range(0, len(alike), at_once):
            yield alike[start : start + at_once]


def _grams(groups: list[list[Head]], *, raw: bool, linearised: bool = False) -> Grams:
    """The products of a chunk: queries as (groups, heads, d_h, d), keys as (groups, 1, d_h, d)."""

    def weight(head: Head, projection: Projection) -> Tensor:
        projection = projection if raw else projection.folded()
        found = projection.linearised() if linearised else projection.weight
        return found.detach() if raw else _turned_rows(head, found.detach())

    first = groups[0][0]
    dtype = widen(first.query.weight[:0]).dtype
    shape = len(groups), len(groups[0]), first.d_head, first.d_model
    query, key = torch.empty(shape, dtype=dtype), torch.empty(shape[0], 1, *shape[2:], dtype=dtype)
    for number, group in enumerate(groups):
        key[number, 0] = weight(group[0], group[0].key)
        for index, head in enumerate(group):
            query[number, index] = weight(head, head.query)
    return grams(query, key)


def _turned_rows(head: Head, weight: Tensor) -> Tensor:
    """At offset 0 rotary positions do nothing but multiply the rows that turn by the amplitude."""
    if head.rotary is None or head.rotary.amplitude == 1:
        return weight
    amplitude = weight.new_ones(head.d_head)
    amplitude[head.rotary.pairs.flatten()] = head.rotary.amplitude
    return weight * amplitude[:, None]


def _profiles(
    groups: list[list[Head]], products: Grams, *, length: int, temperature: float | None, raw: bool
) -> Tensor:
    """ρ over the context for every head of a chunk, by the closed form, with its rotary positions and norms."""
    head = groups[0][0]
    if not (head.query.is_linear and head.key.is_linear):
        products = _grams(groups, raw=raw, linearised=True)
    temperature = head.temperature if temperature is None else temperature
    if head.rotary is None:
        found = moments_of(products, d_model=head.d_model)
        return closed_form.from_moments(found, length=length, temperature=temperature).flatten(0, 1)
    positions = torch.linspace(1, length, min(length, NUM_POSITIONS)).round().long()
    profile = rotary.from_grams(
        products,
        length=length,
        frequencies=head.rotary.frequencies(length),
        pairs=head.rotary.pairs,
        positions=positions,
        temperature=temperature,
    )
    return profile.flatten(0, 1)


def _rows(
    chunk: list[Head], products: Grams, profiles: Tensor, *, temperature: float | None, keep_eigenvalues: bool
) -> Iterator[HeadRow]:
    found = moments_of(products, d_model=chunk[0].d_model)
    values = torch.linalg.eigvals(products.core).flatten(0, 1)
    columns = _columns(found) | {
        "spread": spread(values, chunk[0].d_model).tolist(),
        "localisation": regimes.localisation(profiles).tolist(),
        "regime": regimes.classify_all(profiles),
    }
    for number, head in enumerate(chunk):
        yield HeadRow(
            block=head.block,
            layer=head.layer,
            head=head.index,
            key_head=head.index if head.key_index is None else head.key_index,
            d_model=head.d_model,
            d_head=head.d_head,
            temperature=head.temperature if temperature is None else temperature,
            eigenvalues=_pairs(values[number]) if keep_eigenvalues else None,
            **{name: column[number] for name, column in columns.items()},
        )


def _columns(found: Moments) -> dict[str, list[float]]:
    names = ("trace", "trace_of_square", "frobenius_squared", "mean", "variance", "mean_nonzero", "variance_nonzero")
    return {name: getattr(found, name).flatten().tolist() for name in (*names, "xi", "eta")}


def _pairs(values: Tensor) -> tuple[tuple[float, float], ...]:
    """Real and imaginary parts, the largest first, so that equal spectra read alike."""
    order = values.abs().argsort(descending=True, stable=True)
    return tuple((value.real, value.imag) for value in values[order].tolist())
