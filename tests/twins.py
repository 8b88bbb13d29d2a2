"""A stored config against its twin: transformers and the tables read the same entries, the logits must be the same.

`judge(case, values)` builds the model that transformers makes of `values`, runs it, and holds every head that the
reader finds in its tensors, under the same `values`, against the softmax that the model took. Whoever replaces the
reader puts his own in as `opened`.
"""

import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from family_cases.base import shake
from locater.errors import Refusal, Unforeseen
from locater.models import Config, open_model
from locater.models.proof.check import head_error
from locater.models.proof.evidence import Evidence, is_norm
from locater.models.proof.twin import observe_twin, without_warnings

TOLERANCE = 2e-5  # of the largest logit
LARGEST = 512  # of the sizes that a model is built with
SIZE = re.compile(r"(hidden_size|d_model|\bdim|embed_dim|n_embd|n_embed|num_\w*layers|n_layers?|heads?)$")


class Opened(NamedTuple):
    coverage: str
    layers: list


def by_reader(values: Mapping[str, Any], tensors: Any) -> Opened:
    """As `locater scan` opens a file."""
    model = open_model(Config(values), tensors)
    return Opened(str(model.coverage), list(model.layers()))


@dataclass(frozen=True)
class Verdict:
    """`kind` is right, refused, partial (said in the coverage), unbuildable (by transformers), or wrong."""

    kind: str
    words: str = ""
    coverage: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.kind == "wrong"


class CannotBuild(Exception):
    pass


def judge(
    case: Any, values: Mapping[str, Any], *, usual: str = "COMPLETE", opened: Callable[..., Opened] = by_reader
) -> Verdict:
    """Right, refused or said, or else wrong; `usual` is the coverage of the case before anything was changed."""
    try:
        evidence = watch(case, values)
    except CannotBuild as reason:
        return Verdict("unbuildable", str(reason))
    try:
        coverage, layers = opened(json.loads(json.dumps(values)), evidence.tensors)
    except Unforeseen as reason:
        return Verdict("wrong", f"a fault of ours: {reason}")
    except Refusal as reason:
        return Verdict("refused", str(reason))
    if refused := [reason for layer in layers for reason in layer.refused]:
        return Verdict("refused", refused[0], coverage)
    fault = next(differences(evidence, layers, is_complete=coverage.startswith("COMPLETE")), None)
    if fault is None:
        return Verdict("right", coverage=coverage)
    return Verdict("partial" if coverage != usual and "PARTIAL" in coverage else "wrong", fault, coverage)


def full_config(case: Any, values: Mapping[str, Any]) -> Any:
    """The config object that transformers reads from a file with these entries."""
    import transformers

    return getattr(transformers, case.config).from_dict(json.loads(json.dumps(values)))


def watch(case: Any, values: Mapping[str, Any]) -> Evidence:
    """One pass of the model that transformers makes of these values."""
    import transformers

    torch.manual_seed(0)
    with warnings.catch_warnings(), without_warnings():
        warnings.simplefilter("ignore")
        try:
            config, make = full_config(case, values), getattr(transformers, case.model)._from_config
            if largest(config.to_dict()) > LARGEST:  # a size that was taken out is the published model's
                raise CannotBuild("too large")
            model = shake(make(config, attn_implementation="eager").eval().float())
            with torch.no_grad():
                case.prepare(model)
                seen = observe_twin(model, case.inputs(model.config))
        except Exception as reason:  # whatever transformers raises: it cannot read these values
            raise CannotBuild(f"{type(reason).__name__}: {reason}"[:200]) from None
    return Evidence(model, seen)


def largest(values: Mapping[str, Any]) -> int:
    """Of the whole numbers in a config that are sizes: those of its lengths and tokens cost nothing."""
    sizes = {path: value for path, value in flat(values).items() if type(value) is int}
    return max((size for path, size in sizes.items() if SIZE.search(path)), default=0)


def differences(evidence: Evidence, layers: list, *, is_complete: bool) -> Iterator[str]:
    """In words, whatever is not the model's own: logits, admitted keys, norms, layers without heads."""
    calls, turns, used = defaultdict(list), defaultdict(int), set()
    for call in evidence.seen.calls:
        calls[call.module].append(call)
    for layer in layers:
        place = f"{layer.block} layer {layer.number}"
        query, key = (evidence.module_names.get(name, name) for name in (layer.query_name, layer.key_name))
        owner = max((name for name in calls if f"{query}.".startswith(f"{name}.")), key=len, default=None)
        turn, turns[query, layer.block] = turns[query, layer.block], turns[query, layer.block] + 1
        if layer.block == "cross" and query in evidence.modules and not evidence.seen.inputs[query]:
            continue  # built, and not run: the sample has nothing for it to look at
        if owner is None or turn >= len(calls[owner]):
            yield f"{place}: the model has no attention there"
            continue
        call = calls[owner][turn]
        used.add((owner, turn))
        x_query, x_key = (evidence.seen.inputs[name][turn] for name in (query, key))
        if len(layer.heads) != call.logits.shape[1]:
            yield f"{place}: {len(layer.heads)} heads for {call.logits.shape[1]}"
        for x, projection in ((x_query, layer.heads[0].query), (x_key, layer.heads[0].key)):
            if not norm_is_right(projection.input_norm, x, evidence):
                yield f"{place}: another norm before the projection"
        for head in layer.heads:
            try:
                error, masks_differ = head_error(head, x_query, x_key, call)
            except Refusal as reason:
                yield f"{place}: {reason}"
                continue
            if not error <= TOLERANCE:
                yield f"{place}, head {head.index}: logits off by {error:.2g} of the largest"
            if masks_differ:
                yield f"{place}, head {head.index}: other keys are admitted"
    left = [name for name in calls for turn in range(len(calls[name])) if (name, turn) not in used]
    if left and is_complete:
        yield f"attention of `{left[0]}` left out"


def norm_is_right(norm: Any, x: torch.Tensor, evidence: Evidence) -> bool:
    """What the row's norm makes of the input of some norm in the model is x; without one, x came out of none."""
    norms = [name for name, module in evidence.modules.items() if is_norm(name, module)]
    if norm is None:
        outputs = (y for name in norms for y in evidence.seen.outputs[name] if y is not None)
        return not any(y.shape == x.shape and torch.equal(y, x) for y in outputs)
    inputs = (y for name in norms for y in whole_and_joined(evidence.seen.inputs[name]) if y.shape == x.shape)
    return any((norm(y) - x).abs().max() <= 1e-5 * (1 + x.abs().max()) for y in inputs)


def whole_and_joined(parts: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """Each input, and all of them along the tokens: a feed-forward may be computed in chunks."""
    there = [y for y in parts if y is not None]
    fits = len(there) > 1 and all(y.dim() == 3 and y.shape[::2] == there[0].shape[::2] for y in there)
    return [*there, torch.cat(there, 1)] if fits else there


# ------------------------------------------------------------------------------------------------------------ entries
class Recorder(Mapping):
    """A config that notes which of its entries are asked for, by their path."""

    def __init__(self, values: Mapping[str, Any], asked: set[str], path: str = "") -> None:
        self.table, self.asked, self.path = values, asked, path

    def __getitem__(self, key: str) -> Any:
        self.asked.add(self.path + key)
        value = self.table[key]
        return Recorder(value, self.asked, f"{self.path}{key}.") if isinstance(value, Mapping) else value

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(self.path + key)
        return self[key] if key in self.table else default

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


def asked_for(values: Mapping[str, Any], tensors: Any) -> set[str]:
    """The entries that the reader looks for in this config, whether they are there or not."""
    asked: set[str] = set()
    with suppress(Refusal):
        list(open_model(Config(Recorder(values, asked)), tensors).layers())
    return asked - {"model_type"}


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Every entry by its path; tables are followed, and stand for themselves too."""
    entries: dict[str, Any] = {}
    for key, value in values.items():
        entries[f"{path}{key}"] = value
        if isinstance(value, Mapping):
            entries |= flat(value, f"{path}{key}.")
    return entries


ABSENT = object()


def changed(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any] | None:
    """A copy with one entry set, or taken out; tables on the way are made. None where nothing would change."""
    copy = json.loads(json.dumps(values))
    *tables, last = path.split(".")
    place = copy
    for key in tables:
        if not isinstance(place.get(key), dict):
            if value is ABSENT:
                return None
            place[key] = {}
        place = place[key]
    if place.get(last, ABSENT) is value or (
        last in place and place[last] == value and type(place[last]) is type(value)
    ):
        return None
    if value is ABSENT:
        del place[last]
    else:
        place[last] = value
    return copy


# What an entry is given besides the values that it has elsewhere.
WORDS = {
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0},
        {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0, "partial_rotary_factor": 0.5},
        {"rope_type": "proportional", "rope_theta": 77.0, "partial_rotary_factor": 0.5},
        {"rope_type": "yarn", "rope_theta": 77.0, "factor": 3.0, "original_max_position_embeddings": 16},
        {"rope_theta": 77.0},
    ],
    "rope_scaling": [{"type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 3.0}],
}


def unusual(path: str, examples: list[Any]) -> list[Any]:
    """Values that an entry does not have as a rule, made of those that it has in some config; and none at all."""
    further: list[Any] = []
    for example in examples:
        if isinstance(example, bool):
            further += [True, False]
        elif isinstance(example, int):
            further += [2 * example, max(1, example // 2)]
        elif isinstance(example, float):
            further += [round(0.37 * example + 0.21, 6), 1]
        elif isinstance(example, str):
            further += [example, "unheard-of"]
        elif isinstance(example, list):
            further += [example[::-1], example[:1] * len(example)]
    kept: list[Any] = []
    for value in further:
        if not any(value == other and type(value) is type(other) for other in kept):
            kept.append(value)
    return [*WORDS.get(path.rpartition(".")[2], ()), ABSENT, None, *kept[:3]]


def forms(case: Any) -> dict[str, dict[str, Any]]:
    """The case's config as an author would write it, and as transformers saves it."""
    import transformers

    written = {"model_type": getattr(transformers, case.config).model_type, **json.loads(json.dumps(case.settings))}
    saved = json.loads(json.dumps(watch(case, written).model.config.to_dict(), default=str))
    return {"written": written, "saved": saved}
