"""A model as the tables see it: its family, where its attention lies, and what of it is left out."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from ..errors import Refusal, missing, refusal
from .config import Config, resolve
from .coverage import BY_LAYOUT, Coverage, coverage_of, spans
from .module import AttentionModule, Stack, find_stack
from .neighbours import Surroundings
from .reader import read_heads
from .registry import find_family
from .schema import Family
from .tensors import Once, Tensors, unstacked


@dataclass(frozen=True)
class Model:
    """A family's rows applied to a config and tensors: a stack of attention modules for each row that is stored."""

    family: str
    stacks: tuple[Stack, ...]
    coverage: Coverage

    @property
    def num_layers(self) -> int:
        """Layers of the whole model, stored here or not."""
        return max(stack[0].num_layers for stack in self.stacks)

    def layers(self) -> Iterator[AttentionModule]:
        """Every attention module with its heads, read one at a time."""
        return map(read_heads, self.modules())

    def modules(self, wanted: Collection[int] | None = None) -> tuple[AttentionModule, ...]:
        """The attention modules of the wanted layers, by default of all; no weight is read yet."""
        return tuple(one for stack in self.stacks for one in stack if wanted is None or one.number in wanted)


def open_model(config: Config, tensors: Tensors, *, family: Family | None = None) -> Model:
    """Find the family by table or proof, or take the one given, and look for its tensors; nothing is read yet."""
    proof, tensors, given, is_described = None, unstacked(tensors), config, family is not None
    if family is None:
        try:
            family = find_family(config, tensors.names)
        except Refusal as unknown:
            from .proof import proven  # few models need it

            family, config, proof = proven(config, tensors.names, unknown)
    stacks = tuple(stack for row in family.attention if (stack := find_stack(row, config, tensors)))
    if not stacks:
        first = family.attention[0].query
        raise missing(f"tensors of the family {family.name}, such as `{first}`", "describe them with --layout")
    _check_torn(family, config, stacks)
    coverage = coverage_of(family, given, stacks, proven=None if proof is None else config)
    if is_described:
        coverage = replace(coverage, basis=BY_LAYOUT)
    elif proof is not None:
        absent = len(family.attention) - len(stacks)
        further = (f"{absent} of its stacks not in this file",) if absent else ()
        coverage = replace(coverage, remarks=(*further, proof))
    elif config.get("model_type") not in family.model_types:
        named = f"by its tensor names, as {family.name}, not run"
        coverage = replace(coverage, basis=named)
    return Model(family.name, tuple(map(_sharing, stacks)), coverage)


def _sharing(stack: Stack) -> Stack:
    """Layers that have tensors in common (ALBERT) read them once, if read in turn."""
    if len({module.query_name for module in stack}) == len(stack):
        return stack
    held = Once(stack[0].tensors)
    return tuple(replace(module, tensors=held) for module in stack)


def _check_torn(family: Family, config: Config, stacks: tuple[Stack, ...]) -> None:
    """A stack without queries may be missing as a whole; where its keys or values are stored, the file was torn."""
    around, names = Surroundings.of(one for stack in stacks for one in stack), stacks[0][0].tensors.names
    found = [stack[0].row for stack in stacks]
    for row in family.attention:
        if row in found or row.names is not None or not resolve(row.only, config.within(row.config)):
            continue
        module = row.key.split("|")[0].format(layer=0, previous=0, head=0).rpartition(".")[0]
        inside = (f"{prefix}{module}." for prefix in row.prefixes or ())
        torn = next((name for part in inside for name in names if name.startswith(part)), None)
        if torn is not None and module and around.inside(torn) is None:
            raise missing(f"queries as `{row.query}` next to `{torn[:120]}`", "the file is incomplete")


def wanted_layers(wanted: Iterable[int] | None, known: Iterable[int]) -> frozenset[int]:
    """The numbers of the layers asked for, by default all; refused where the model has no such layer."""
    there = frozenset(known)
    chosen = there if wanted is None else frozenset(wanted)
    if chosen and chosen <= there:
        return chosen
    had = f"layers among {spans(sorted(there))}, all that this model has"
    raise refusal(had, spans(sorted(chosen - there)) or "none", "layers count from 0")
