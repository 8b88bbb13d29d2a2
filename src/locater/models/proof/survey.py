"""Every model type of the installed transformers: known by the tables, proven, or refused with the reason.

Proofs run in a process of their own, which is ended when a type takes too long; the next type gets a new one.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import resources

import torch

from ...records import Json, parse_json
from ..registry import FAMILIES
from . import Proof, keep_proof, path_of_proof, read_proof, recall, version

TIMEOUT = 120.0  # seconds of the clock, for machines that have other work too


@dataclass(frozen=True)
class SurveyEntry:
    """`how` is table, proven, refused or untried; `listed`: by the package's table, with that transformers."""

    model_type: str
    how: str
    row: str = ""
    error: float | None = None
    notes: tuple[str, ...] = ()
    reason: str = ""
    inputs: tuple[str, ...] = ()
    listed: str = ""

    @property
    def has_media(self) -> bool:
        """Tell whether images or sound are among its inputs."""
        return bool({*self.inputs} - {"input_ids"})

    def to_json(self) -> Json:
        return asdict(self)


def model_types() -> list[str]:
    """All that transformers knows, and what the tables know besides, in order."""
    version()
    from transformers import CONFIG_MAPPING

    return sorted({*CONFIG_MAPPING.keys(), *(name for family in FAMILIES for name in family.model_types)})


def survey(
    types: Iterable[str], *, update: bool = False, tell: Callable[[str], None] = lambda line: None
) -> Iterator[SurveyEntry]:
    """Yield an entry per type: from the tables and the cache, or with `update` proven again, one after the other."""
    worker = _Worker()
    try:
        for model_type in types:
            family = next((family.name for family in FAMILIES if model_type in family.model_types), None)
            if family is not None:
                yield SurveyEntry(model_type, "table", family)
                continue
            tell(model_type)
            yield _entry(model_type, worker.prove(model_type) if update else read_proof(path_of_proof(model_type)))
    finally:
        worker.end()


def _entry(model_type: str, proof: Proof | None) -> SurveyEntry:
    if proof is None:
        untried = SurveyEntry(model_type, "untried", reason="not tried yet: --update")
        return listed_entries().get(model_type, untried)
    if not proof.is_proven:
        return SurveyEntry(model_type, "refused", reason=proof.reason or "", inputs=proof.inputs)
    return SurveyEntry(model_type, "proven", proof.names, proof.error, proof.notes, inputs=proof.inputs)


@cache
def listed_entries() -> dict[str, SurveyEntry]:
    """Read the proofs that come with the package, made with the transformers that each entry names."""
    document = parse_json(resources.files("locater.models").joinpath("families.json").read_bytes())
    return {
        kept["model_type"]: SurveyEntry(**kept | {"inputs": tuple(kept["inputs"]), "listed": document["transformers"]})
        for kept in document["families"]
        if kept["how"] != "table"
    }


class _Worker:
    """A process that proves one type at a time; one that takes too long, or has died, is replaced."""

    def __init__(self) -> None:
        self.pool = None

    def prove(self, model_type: str) -> Proof:
        # A process of its own: a twin can run without end, or take the memory of all, and nothing else could stop it.
        self.pool = self.pool or multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (1,))
        try:
            return self.pool.apply_async(partial(recall, again=True), (model_type,)).get(TIMEOUT)
        except multiprocessing.TimeoutError:
            self.end()
        proof = Proof(model_type, version(), reason=f"took more than {TIMEOUT:g} s, or ended its process")
        keep_proof(proof, path_of_proof(model_type))
        return proof

    def end(self) -> None:
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()
        self.pool = None


def count_kinds(entries: Iterable[SurveyEntry]) -> dict[str, int]:
    """Count the types known in each way, and those of the known that take images or sound."""
    entries = list(entries)
    numbers = {how: sum(entry.how == how for entry in entries) for how in ("table", "proven", "refused", "untried")}
    return numbers | {"with images or sound": sum(entry.has_media for entry in entries if entry.how == "proven")}
