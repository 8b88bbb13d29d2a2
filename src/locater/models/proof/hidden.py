"""Checks beyond equal logits: sinks, gates, differences of two maps, sparse masks, and modules that never ran."""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ...records import JsonMapping
from ..schema import Attention
from .evidence import Calls, Evidence, same
from .observe import Call
from .twin import NUM_TOKENS

# Config entries whose effect begins only beyond the twin's few tokens.
LATER = {
    "attn_temperature_tuning": "the growth of logits with the position",
    "llama_4_scaling_beta": "the growth of logits with the position",
    "index_topk": "the choice of the best keys by an indexer",
}
WINDOW = re.compile(
    r"\w*(window_size|sliding_window|attention_window|local_attention|attention_chunk_size|attn_window)$"
)
# Parameters of an attention module that are neither projections nor norms.
TELLING = re.compile(r"lambda|gate|sink|index|temper|bias_table|compress|router|relative|rel_pos|scale", re.IGNORECASE)


def unread(calls: Calls, row: Attention) -> Iterator[str]:
    """In words, whatever happens in the stack's modules between the softmax and the output projection."""
    known = [pattern.rpartition(".")[2] for pattern in (row.sink, row.buckets and row.buckets.name) if pattern]
    names = set(_own(calls.evidence.modules[calls.owner]))
    further = sorted(name for name in names if TELLING.search(name) and name not in known)
    named = f" ({', '.join(f'`{name}`' for name in further[:4])})" if further else ""
    every = [call for some in calls.by_layer.values() for call in some]
    if row.sink is None and any(call.is_sunk for call in every):
        yield f"a sink in the softmax of `{calls.place}`{named}"
    elif all(is_plain(call, calls.evidence) for call in every):
        yield from [f"what `{calls.place}` does with{named}"] if further else []
    elif any("lambda" in name for name in further):
        yield f"the difference of two maps in `{calls.place}`, each read as a head{named}"
    elif row.gated or any("gate" in name or "g_proj" in name for name in names):
        yield f"the output gate of `{calls.place}`{named}"
    else:
        yield f"what `{calls.place}` does to its attention's output{named}"


def _own(module: nn.Module) -> Iterator[str]:
    """Names of parameters beneath a module."""
    return (name.removesuffix(".weight").removesuffix(".bias") for name, _ in module.named_parameters())


def is_plain(call: Call, evidence: Evidence) -> bool:
    """Tell whether the average of values goes into the output projection as it is."""
    for product in call.averages:
        out = product[1] if isinstance(product, tuple) else product
        if out.dim() == 3 and out.shape[0] % call.logits.shape[0] == 0:
            out = out.unflatten(0, (call.logits.shape[0], -1))
        if out.dim() != 4 or (isinstance(product, tuple) and not _is_of(product[0], call)):
            continue
        merged = out.transpose(1, 2).flatten(2)
        if _is_taken(merged, call, evidence):
            return True
    return False


def _is_of(left: Tensor, call: Call) -> bool:
    weights = call.weights
    if weights is None or left.numel() != weights.numel():
        return weights is not None and left.dim() == weights.dim() and same(left, weights[..., : left.shape[-1]])
    return same(left.reshape(weights.shape), weights)


def _is_taken(merged: Tensor, call: Call, evidence: Evidence) -> bool:
    """Tell whether some module under or next to the attention takes this tensor."""
    near = call.module.rpartition(".")[0]
    for name, inputs in evidence.seen.inputs.items():
        if name.startswith(near) and isinstance(getattr(evidence.modules.get(name), "weight", None), Tensor):
            for x in inputs:
                if x is not None and x.numel() == merged.numel() and same(x.reshape(merged.shape), merged):
                    return True
    return isinstance(evidence.modules.get(call.module), nn.MultiheadAttention)


def later(values: JsonMapping) -> Iterator[str]:
    """Entries of the config, at any depth, whose effect a short text does not show."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from later(value)
        elif value and key in LATER:
            yield f"{LATER[key]} (`{key}`)"
        elif WINDOW.match(str(key)) and any(isinstance(size, int) and size > NUM_TOKENS for size in _listed(value)):
            yield f"a window that the twin's {NUM_TOKENS} tokens do not reach (`{key}`)"


def _listed(value: object) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def silent(evidence: Evidence) -> Iterator[str]:
    """Places of attention modules with parameters in which no softmax was seen."""
    heard = {call.module for call in evidence.seen.calls}
    patterns = {}
    for name, module in evidence.modules.items():
        if not re.search(r"attention|attn", type(module).__name__, re.IGNORECASE) or not any(
            True for _ in module.parameters()
        ):
            continue
        if any(other == name or other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in heard):
            continue
        pattern = re.sub(r"\.\d+(?=\.|$)", ".{layer}", name, count=1)
        if not any(pattern.startswith(f"{other}.") for other in patterns):
            patterns[pattern] = True
    yield from patterns
