"""A model as the tables see it: its family, where its attention lies, and what of it is left out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..errors import refusal
from .places import Places, Tensors
from .proof.cache import known_or_proven
from .reader import Layer, build
from .schema import Config, Family


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


def open_model(config: Config, tensors: Tensors, *, family: Family | None = None) -> Model:
    """Find the family by table or proof, or take the one given, and look for its tensors; nothing is read yet."""
    proof = None
    if family is None:
        family, config, proof = known_or_proven(config, tensors.names)
    places = tuple(one for row in family.attention if (one := Places.find(row, config, tensors)))
    if not places:
        first = family.attention[0].query
        raise refusal(f"tensors of the family {family.name}, such as `{first}`", "none", "describe them with --layout")
    partial = family.partial(config) if family.partial else None
    coverage = _coverage(places, partial)
    if proof is not None:
        absent = len(family.attention) - len(places)
        coverage += f", {absent} of its stacks not in this file" if absent else ""
    return Model(family.name, places, coverage if proof is None else f"{coverage}, {proof}")


def _coverage(places: tuple[Places, ...], partial: str | None) -> str:
    stored, layers = sum(len(one.layers) for one in places), sum(one.num_layers for one in places)
    missing = [
        f"no softmax attention in {one.row.block} layers {spans(sorted(set(range(one.num_layers)) - set(one.layers)))}"
        for one in places
        if len(one.layers) < one.num_layers
    ]
    reasons = [*missing, *([partial] if partial else [])]
    return ", ".join([f"PARTIAL: {stored} of {layers} layers", *reasons]) if reasons else "COMPLETE"


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
