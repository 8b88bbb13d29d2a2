"""A model as the tables see it: its family, where its attention lies, and what of it is left out."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ..errors import refusal
from .biases import lost_norm, misplaced_bias
from .neighbours import (
    Surroundings,
    missing_layers,
    outer_modules,
    uneven_layers,
    unknown_neighbours,
    unread_queries,
)
from .places import Places, Tensors
from .proof.cache import known_or_proven
from .reader import Layer, build
from .schema import Config, Family, ask, resolve
from .slices import Slices, slices
from .stacked import unstacked


@dataclass(frozen=True)
class Model:
    """`coverage` is COMPLETE, or PARTIAL with what is missing in words."""

    family: str
    places: tuple[Places, ...]
    coverage: str

    def layers(self, wanted: Iterable[int] | None = None) -> Iterator[Layer]:
        """Every attention module of the wanted layers, read one at a time."""
        chosen = None if wanted is None else frozenset(wanted)
        for places in self.places:
            yield from build(places, (n for n in places.layers if chosen is None or n in chosen))

    def slices(self, wanted: Collection[int]) -> Iterator[Slices]:
        """The rows of every attention module of these layers; no weight is read."""
        return (slices(places, n) for places in self.places for n in places.layers if n in wanted)


def open_model(config: Config, tensors: Tensors, *, family: Family | None = None) -> Model:
    """Find the family by table or proof, or take the one given, and look for its tensors; nothing is read yet."""
    proof, tensors = None, unstacked(tensors)
    if family is None:
        family, config, proof = known_or_proven(config, tensors.names)
    places = tuple(one for row in family.attention if (one := Places.find(row, config, tensors)))
    if not places:
        first = family.attention[0].query
        raise refusal(f"tensors of the family {family.name}, such as `{first}`", "none", "describe them with --layout")
    _check_torn(family, config, places)
    partial = ask(family.partial, config) if family.partial else None
    coverage = _coverage(places, partial, tensors.names, is_known=bool(family.model_types))
    if config.get("model_type") is None and family.model_types:
        coverage += f", read as {family.name} by its tensor names: the config has no model type"
    if proof is not None:
        absent = len(family.attention) - len(places)
        coverage += f", {absent} of its stacks not in this file" if absent else ""
    return Model(family.name, places, coverage if proof is None else f"{coverage}, {proof}")


def _coverage(places: tuple[Places, ...], partial: str | None, names: Collection[str], *, is_known: bool) -> str:
    """`is_known`: of a family whose code is known, so that its rows say which biases there are."""
    stored, layers = sum(len(one.layers) for one in places), sum(one.num_layers for one in places)
    reasons = [reason for one in places for reason in _missing(one)] + ([partial] if partial else [])
    reasons += [reason for one in places if (reason := uneven_layers(one))]
    checks = (misplaced_bias, lost_norm) if is_known else ()
    reasons += [reason for one in places for check in checks if (reason := check(one))]
    around = Surroundings.of(() if partial else places)
    if not partial and (unknown := unknown_neighbours(around, places[0].tensors)):
        listed = f"`{unknown[0][:120]}`" + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")
        reasons.append(f"not in the heads: {listed}")
    if not partial and (unread := unread_queries(around, names)):
        reasons.append(f"{len(unread)} further tensors that look like queries, such as `{unread[0][:120]}`")
    return ", ".join([f"PARTIAL: {stored} of {layers} layers", *reasons]) if reasons else "COMPLETE"


def _check_torn(family: Family, config: Config, places: tuple[Places, ...]) -> None:
    """A stack without queries may be missing as a whole; where its keys or values are stored, the file was torn."""
    around, names = Surroundings.of(places), places[0].tensors.names
    found = [one.row for one in places]
    for row in family.attention:
        if row in found or row.names is not None or not resolve(row.only, config.within(row.config)):
            continue
        module = row.key.split("|")[0].format(layer=0, previous=0, head=0).rpartition(".")[0]
        inside = (f"{prefix}{module}." for prefix in row.prefixes or ())
        torn = next((name for part in inside for name in names if name.startswith(part)), None)
        if torn is not None and module and not any(outer in around.modules for outer in outer_modules(torn)):
            raise refusal(f"queries as `{row.query}` beside `{torn[:120]}`", "none", "the file is incomplete")


def _missing(places: Places) -> Iterator[str]:
    without, absent, beyond = missing_layers(places)
    if without:
        yield f"no queries and keys in {places.row.block} layers {spans(without)}"
    if absent:
        yield f"{places.row.block} layers {spans(absent)} are not in the file"
    if beyond:
        yield f"{places.row.block} layers {spans(beyond)} of the file are not in the config"


def wanted_layers(wanted: Iterable[int] | None, known: Iterable[int]) -> frozenset[int]:
    """The numbers of the layers asked for, by default all; refused where the model has no such layer."""
    there = frozenset(known)
    chosen = there if wanted is None else frozenset(wanted)
    if chosen and chosen <= there:
        return chosen
    had = f"layers among {spans(sorted(there))}, all that this model has"
    raise refusal(had, spans(sorted(chosen - there)) or "none", "layers count from 0")


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers as a reader would list them.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
