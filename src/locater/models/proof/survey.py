"""Every model type of the installed transformers: known by the tables, proven, or refused with the reason.

Proofs run in a process of their own, which is ended when a type takes too long; the next type gets a new one.
"""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ...records import Json
from ..registry import FAMILIES
from . import Proof, keep, path_of_proof, read_proof, recall, version

TIMEOUT = 120.0  # seconds of the clock, for machines that have other work too
MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


@dataclass(frozen=True)
class SurveyEntry:
    """`how` is table, proven, refused or untried."""

    model_type: str
    how: str
    row: str = ""
    error: float | None = None
    notes: tuple[str, ...] = ()
    reason: str = ""
    inputs: tuple[str, ...] = ()

    @property
    def has_media(self) -> bool:
        """Tell whether images or sound are among its inputs."""
        return any(name in MEDIA for name in self.inputs)

    def to_json(self) -> Json:
        lists = {"notes": list(self.notes), "inputs": list(self.inputs)}
        return (
            {"model_type": self.model_type, "how": self.how, "row": self.row, "error": self.error}
            | lists
            | {"reason": self.reason}
        )


def model_types() -> list[str]:
    """All that transformers knows, and what the tables know besides, in order."""
    version()
    from transformers import CONFIG_MAPPING

    return sorted({*CONFIG_MAPPING.keys(), *(name for family in FAMILIES for name in family.model_types)})


def survey(
    types: Iterable[str],
    *,
    update: bool = False,
    timeout: float = TIMEOUT,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[SurveyEntry]:
    """Yield an entry per type: from the tables and the cache, or with `update` proven again, one after the other."""
    worker = Worker(timeout)
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
        return SurveyEntry(model_type, "untried", reason="not tried yet: locater families --update")
    if not proof.is_proven:
        return SurveyEntry(model_type, "refused", reason=proof.reason or "", inputs=proof.inputs)
    return SurveyEntry(model_type, "proven", proof.names, proof.error, proof.notes, inputs=proof.inputs)


class Worker:
    """A process that proves one type at a time."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.process: Any = None
        self.connection: Connection | None = None

    def prove(self, model_type: str) -> Proof:
        if self.process is None or not self.process.is_alive():
            self._start()
        assert self.connection is not None
        self.connection.send(model_type)
        try:
            if self.connection.poll(self.timeout):
                return Proof.from_json(self.connection.recv())
            reason = f"took more than {self.timeout:g} s"
        except EOFError:
            reason = "ended its process"
        self.end()
        proof = Proof(model_type, version(), reason=reason)
        keep(proof, path_of_proof(model_type))
        return proof

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(far,), daemon=True)
        self.process.start()
        far.close()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = None


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            model_type = connection.recv()
        except EOFError:
            return
        connection.send(recall(model_type, again=True).to_json())


def count_entries(entries: Iterable[SurveyEntry]) -> dict[str, int]:
    """Count the types known in each way, and those of the known that take images or sound."""
    entries = list(entries)
    numbers = {how: sum(entry.how == how for entry in entries) for how in ("table", "proven", "refused", "untried")}
    return numbers | {"with images or sound": sum(entry.has_media for entry in entries if entry.how == "proven")}
