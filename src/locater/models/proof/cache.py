"""Proofs kept: a file each in the user's cache, named by model type, config, transformers and this search itself."""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from ...documents import as_written, read_json
from ...errors import Refusal
from ...records import JsonMapping, cache_folder, write_json
from ..config import Config
from ..registry import is_in_tables
from ..schema import Family
from . import Proof, family_of, prove, unseen, version

SEARCH = 8  # raise it when the search or the menu of recipes changes: older proofs are then made again
# Entries that say nothing of the attention, and differ between files of one model.
IRRELEVANT = (
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "auto_map", "quantization_config",
    "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id",
)  # fmt: skip


def proven(config: Config, names: Collection[str], unknown: Refusal) -> tuple[Family, Config, str]:
    """The family by proof of a model that no table names, its config with all defaults, and the proof in words.

    Refuses as the tables did where transformers is missing, does not know the type, or its twin follows no row.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or is_in_tables(model_type) or not is_known(model_type):
        raise unknown
    proof = recall(model_type, config.values)
    if not proof.is_proven:
        first, line, rest = str(unknown).partition("\n")
        raise Refusal(f"{first}; no row could be proven for it either: {proof.reason}{line}{rest}") from None
    family, own = family_of(proof, config.values, unseen(proof, names))
    words = f"by the row {proof.names}, proven to {proof.error:.0e} with transformers {proof.transformers}"
    return family, own, words


def is_known(model_type: str) -> bool:
    """Tell whether transformers is installed and has a config class for it."""
    try:
        version()
    except Refusal:
        return False
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def recall(model_type: str, values: JsonMapping | None = None, *, again: bool = False) -> Proof:
    """The proof from the cache, or made now and kept."""
    path = path_of_proof(model_type, values)
    if not again and (kept := read(path)) is not None:
        return kept
    proof = prove(model_type, values)
    keep(proof, path)
    return proof


def path_of_proof(model_type: str, values: JsonMapping | None = None) -> Path:
    relevant = {key: value for key, value in (values or {}).items() if key not in IRRELEVANT}
    text = json.dumps([SEARCH, version(), model_type, relevant], sort_keys=True, default=str)
    identity = hashlib.sha256(text.encode()).hexdigest()[:16]
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in model_type)
    return cache_folder() / "proofs" / f"{safe}-{identity}.json"


def read(path: Path) -> Proof | None:
    """A kept proof; None where there is none, or where the file is damaged: it can be made again."""
    try:
        with as_written(path):
            return Proof.from_json(read_json(path))
    except Refusal:
        return None


def keep(proof: Proof, path: Path) -> None:
    """Written whole or not at all; a cache that cannot be written costs time, not the scan."""
    try:
        write_json(proof.to_json(), path)
    except Refusal:
        return
