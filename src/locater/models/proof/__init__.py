"""Families by proof: a tiny twin of a model that no table names shows which row its attention follows.

Proven means: the logits of every head in every layer of the twin are those of the row, to 1e-5 of the largest.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import Refusal
from ...records import Json, JsonMapping, as_written, cache_folder, read_json, write_json
from ..config import Config
from ..coverage import telling
from ..registry import is_in_tables
from ..schema import Family
from .recipes import row_of

__all__ = ["Proof", "family_of", "inside", "prove", "unseen", "version"]

INPUTS = ("input_ids", "pixel_values", "pixel_values_videos", "input_features", "input_values")
BESIDE = ("_scale_inv", "_scale", "inv_freq", "num_batches_tracked", "masked_bias")  # no weight of its own


@dataclass(frozen=True)
class Proof:
    """Knowledge of a model type: the recipes of its rows with the largest error, or why there are none."""

    model_type: str
    transformers: str
    rows: tuple[JsonMapping, ...] = ()
    error: float = 0.0
    notes: tuple[str, ...] = ()  # what the rows leave out
    reason: str | None = None
    inputs: tuple[str, ...] = ()  # what the model takes: input_ids, pixel_values, …
    tensors: tuple[str, ...] = ()  # what the twin's attention modules store, as it is called within them

    @property
    def is_proven(self) -> bool:
        return self.reason is None

    @property
    def names(self) -> str:
        """The rows in words."""
        return " and ".join(dict.fromkeys(_name(row) for row in self.rows))

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, document: JsonMapping) -> "Proof":
        lists = {key: tuple(document[key]) for key in ("rows", "notes", "inputs", "tensors")}
        return cls(**{**document, **lists})


def _name(row: JsonMapping) -> str:
    sink = ["learned sinks"] if row.get("sink") else []
    if "row" in row:
        return ", ".join([str(row["family"]), *sink])
    parts = [f"fused {row['fused']}" if row["fused"] else "separate projections"]
    parts += ["output gate next to the query"] if row["gated"] else []
    late = " after the rotation" if row.get("turns_first") else ""
    parts += [f"{row['query_norm']['kind']} QK-norm{late}"] if row["query_norm"] else []
    rotary = row["rotary"]
    back = " backward" if rotary and rotary.get("backward") else ""
    parts += [("interleaved" if rotary["interleaved"] else "half-split") + " rotary" + back] if rotary else []
    parts += [f"on {rotary['only']}"] if rotary and rotary["only"] != "every layer" else []
    parts += [f"scale {row['scale']}"] if row["scale"] != "1/√d_head" else []
    return ", ".join(parts + sink)


def version() -> str:
    """The version of transformers; refuses where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise Refusal("transformers is not installed: with it, types that no table names can be proven") from None
    return transformers.__version__


def prove(model_type: str, values: JsonMapping | None = None) -> Proof:
    """Build the twin, watch one pass of it, and look for a row for each of its stacks of attention."""
    from . import twin

    known = Proof(model_type, version())
    try:
        config = twin.full_config(model_type, values)
        return _judge(known, twin.run_twin(config))
    except Refusal as reason:
        return replace(known, reason=str(reason))
    except Exception as reason:  # a config that transformers itself cannot read
        return replace(known, reason=twin.error_line(reason))


def _judge(known: Proof, evidence: Any) -> Proof:
    """Call the type proven if some stack is and no decoder is left over; name whatever else is left over."""
    from .check import later, unheard, unread
    from .search import find_recipe

    takes = inspect.signature(evidence.model.forward).parameters
    known = replace(known, inputs=tuple(name for name in INPUTS if name in takes))
    proven: dict[str, Any] = {}  # by block: verdict and row
    left: list[tuple[str | None, str, str]] = []  # block, place, why
    notes = [*later(evidence.model.config.to_dict())]
    for calls in evidence.places():
        verdict = find_recipe(calls)
        row = row_of(verdict.recipe) if verdict.recipe else None
        if row is None or not verdict.is_proven:
            nearest = f" (nearest: {_name(verdict.recipe)})" if row else ""
            left.append((row and row.block, calls.place, f"{verdict.differs}{nearest}"))
        elif row.block in proven:
            left.append((row.block, calls.place, f"a second {row.block} stack"))
        else:
            proven[row.block] = verdict
            notes += unread(calls, row)
            notes += [f"the mask of `{calls.place}`, which is no plain window"] if verdict.masks_differ else []
    lost = [one for one in left if one[0] == "decoder" and "decoder" not in proven] or ([] if proven else left)
    if lost or not proven:
        reason = f"`{lost[0][1]}`: {lost[0][2]}" if lost else "no softmax attention was seen"
        return replace(known, reason=reason)
    notes += [f"the attention of `{place}`: {why}" for _, place, why in left]
    notes += [f"the attention of `{pattern}`, which the proof did not reach" for pattern in unheard(evidence)]
    rows = tuple(verdict.recipe for verdict in proven.values())
    error = max(verdict.error for verdict in proven.values())
    known = replace(known, rows=rows, error=error, notes=tuple(dict.fromkeys(notes)))
    return replace(known, tensors=tuple(sorted(inside(known, evidence.tensors.names))))


def inside(proof: Proof, names: Collection[str]) -> set[str]:
    """List the tensors in the modules that hold the rows' queries, by the names that they have there."""
    owners = []
    for row in map(row_of, proof.rows):
        patterns = [prefix + name for prefix in row.prefixes or ("",) for name in row.query.split("|")]
        owners += [re.escape(pattern.rpartition(".")[0]).replace(r"\{layer\}", r"\d+") for pattern in patterns]
    within = re.compile(rf"^(?:{'|'.join(dict.fromkeys(owners))})\.(.+)$")
    return {re.sub(r"\d+", "N", match[1]) for name in names if (match := within.match(name))}


def unseen(proof: Proof, names: Collection[str]) -> list[str]:
    """Tensors in a file's attention modules that the twin did not have: they may take part in the logits."""
    further = inside(proof, names) - set(proof.tensors)
    return sorted(name for name in further if not name.endswith(BESIDE))


def family_of(proof: Proof, values: JsonMapping, further: Sequence[str] = ()) -> tuple[Family, Config]:
    """The proven rows as a family, and the model's own config with every default filled in."""
    from . import twin
    from .evidence import expanded

    rows = tuple(row_of(row) for row in proof.rows)
    notes = [f"{note} left out" for note in proof.notes]
    notes += (
        [f"tensors that the proof did not see left out ({', '.join(f'`{name}`' for name in further[:4])})"]
        if further
        else []
    )
    known = twin.known_entries(proof.model_type, values)
    unread = [path for path in telling(values) if known.isdisjoint(path.split("."))]
    notes += [f"not read in the config: `{path[:120]}`" for path in unread[:1]]
    left_out = ", ".join(notes) or None
    family = Family(proof.model_type, (proof.model_type,), rows, partial=lambda config: left_out)
    return family, Config(expanded(twin.full_config(proof.model_type, values)))


# --------------------------------------------------------------------------------------------- proofs kept: a file each
SEARCH = 10  # raise it when the search or the menu of recipes changes: older proofs are then made again
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
    if not isinstance(model_type, str) or is_in_tables(model_type) or not is_in_transformers(model_type):
        raise unknown
    proof = recall(model_type, config.values)
    if not proof.is_proven:
        first, line, rest = str(unknown).partition("\n")
        raise Refusal(f"{first}; no row could be proven for it either: {proof.reason}{line}{rest}") from None
    family, own = family_of(proof, config.values, unseen(proof, names))
    words = f"by the row {proof.names}, proven to {proof.error:.0e} with transformers {proof.transformers}"
    return family, own, words


def is_in_transformers(model_type: str) -> bool:
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
    if not again and (kept := read_proof(path)) is not None:
        return kept
    proof = prove(model_type, values)
    keep_proof(proof, path)
    return proof


def path_of_proof(model_type: str, values: JsonMapping | None = None) -> Path:
    relevant = {key: value for key, value in (values or {}).items() if key not in IRRELEVANT}
    text = json.dumps([SEARCH, version(), model_type, relevant], sort_keys=True, default=str)
    identity = hashlib.sha256(text.encode()).hexdigest()[:16]
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in model_type)
    return cache_folder() / "proofs" / f"{safe}-{identity}.json"


def read_proof(path: Path) -> Proof | None:
    """A kept proof; None where there is none, or where the file is damaged: it can be made again."""
    try:
        with as_written(path):
            return Proof.from_json(read_json(path))
    except Refusal:
        return None


def keep_proof(proof: Proof, path: Path) -> None:
    """Written whole or not at all; a cache that cannot be written costs time, not the scan."""
    try:
        write_json(proof.to_json(), path)
    except Refusal:
        return
