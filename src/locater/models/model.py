"""A model as the tables see it: its family, where its attention lies, and what of it is left out."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from ..errors import missing, refusal
from .coverage import BY_LAYOUT, Coverage, coverage_of, spans
from .module import AttentionModule, modules_of
from .neighbours import Surroundings, outer_modules
from .places import Places, Tensors, unstacked
from .proof.cache import known_or_proven
from .reader import Layer
from .schema import Config, Family, resolve


@dataclass(frozen=True)
class Model:
    """A family's rows applied to a config and tensors."""

    family: str
    places: tuple[Places, ...]
    coverage: Coverage

    def layers(self, wanted: Iterable[int] | None = None) -> Iterator[Layer]:
        """Every attention module of the wanted layers, read one at a time."""
        return (module.build() for module in self.modules(None if wanted is None else frozenset(wanted)))

    def modules(self, wanted: Collection[int] | None = None) -> tuple[AttentionModule, ...]:
        """The attention modules of the wanted layers, by default of all; no weight is read yet."""
        chosen = ((places, [n for n in places.layers if wanted is None or n in wanted]) for places in self.places)
        return tuple(module for places, numbers in chosen for module in modules_of(places, numbers))


def open_model(config: Config, tensors: Tensors, *, family: Family | None = None) -> Model:
    """Find the family by table or proof, or take the one given, and look for its tensors; nothing is read yet."""
    proof, tensors, given, is_described = None, unstacked(tensors), config, family is not None
    if family is None:
        family, config, proof = known_or_proven(config, tensors.names)
    places = tuple(one for row in family.attention if (one := Places.find(row, config, tensors)))
    if not places:
        first = family.attention[0].query
        raise missing(f"tensors of the family {family.name}, such as `{first}`", "describe them with --layout")
    _check_torn(family, config, places)
    coverage = coverage_of(family, given, places, proven=None if proof is None else config)
    if is_described:
        coverage = replace(coverage, basis=BY_LAYOUT)
    elif proof is not None:
        absent = len(family.attention) - len(places)
        further = (f"{absent} of its stacks not in this file",) if absent else ()
        coverage = replace(coverage, remarks=(*further, proof))
    elif config.get("model_type") not in family.model_types:
        named = f"by its tensor names, as {family.name}, not run"
        coverage = replace(coverage, basis=named)
    return Model(family.name, places, coverage)


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
            raise missing(f"queries as `{row.query}` beside `{torn[:120]}`", "the file is incomplete")


def wanted_layers(wanted: Iterable[int] | None, known: Iterable[int]) -> frozenset[int]:
    """The numbers of the layers asked for, by default all; refused where the model has no such layer."""
    there = frozenset(known)
    chosen = there if wanted is None else frozenset(wanted)
    if chosen and chosen <= there:
        return chosen
    had = f"layers among {spans(sorted(there))}, all that this model has"
    raise refusal(had, spans(sorted(chosen - there)) or "none", "layers count from 0")
