"""A row against the evidence: the logits of every head of every layer, and which keys are admitted."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ...attention.masks import admits
from ...errors import Refusal
from ...head import Head
from ...projections import Norm
from ...records import JsonMapping
from ..live.explain import norm_behind
from ..live.logits import largest_gap
from ..module import AttentionModule, find_stack
from ..neighbours import misplaced_bias
from ..reader import read_heads
from ..schema import Attention
from .evidence import Calls, Evidence, SoftmaxCall
from .twin import NUM_TOKENS

TOLERANCE = 1e-5


@dataclass
class Verdict:
    """Distance of a row from a stack of calls; `differs` says where, if it is too far."""

    error: float = 0.0
    differs: str | None = None
    masks_differ: bool = False
    recipe: JsonMapping = field(default_factory=dict)

    @property
    def is_proven(self) -> bool:
        return self.differs is None


def check_row(row: Attention, calls: Calls, *, hasty: bool = False) -> Verdict:
    """`hasty` looks at the first head of the first layer only: enough to throw most rows out."""
    verdict = Verdict()
    try:
        stack = find_stack(row, calls.evidence.config, calls.evidence.tensors)
        modules, layers = {module.number: module for module in stack}, list(calls.by_layer)
        if not set(layers) <= set(modules):
            raise Refusal(f"layers {tuple(modules)}, where the model attends in {tuple(layers)}")
        for layer in layers[:1] if hasty else layers:
            _check_layer(modules[layer], calls, verdict, hasty)
        if not hasty and (misplaced := misplaced_bias(stack)) is not None:
            raise Refusal(misplaced)
    except (Refusal, RuntimeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as reason:
        # Only a row whose logits are off has a distance: any other could look nearer than it.
        error = verdict.error if verdict.error > TOLERANCE else 0.0
        return Verdict(error, str(reason).splitlines()[0][:200])
    return verdict


def _check_layer(module: AttentionModule, place: Calls, verdict: Verdict, hasty: bool) -> None:
    """Refuse a layer with other heads than its calls show, another input norm, or other logits."""
    built, layer, evidence = read_heads(module), module.number, place.evidence
    calls = place.by_layer[layer]
    num_heads = calls[0].logits.shape[1]
    if built.refused or len(built.heads) != num_heads:
        counts = f"{len(built.heads)} heads in layer {layer}, where the model has {num_heads}"
        raise Refusal(built.refused[0] if built.refused else counts)
    x_query, x_key = (input_of(evidence, name) for name in (built.query_name, built.key_name))
    for x, projection in ((x_query, built.heads[0].query), (x_key, built.heads[0].key)):
        if (differs := _norm_differs(projection.input_norm, x, evidence)) is not None:
            raise Refusal(f"the input norm of layer {layer}: {differs}")
    for call in calls:
        for head in built.heads[:1] if hasty else built.heads:
            error, masks = head_error(head, x_query, x_key, call)
            verdict.error, verdict.masks_differ = max(verdict.error, error), verdict.masks_differ or masks
            if not error <= TOLERANCE:
                raise Refusal(f"logits of layer {layer}, head {head.index} by {error:.1g} of the largest")


def input_of(evidence: Evidence, file_name: str) -> Tensor:
    """Return the input of the module that is stored under this name; `nn.MultiheadAttention` takes it itself."""
    name = evidence.module_names.get(file_name, file_name)
    while name and not evidence.seen.inputs.get(name):
        name = name.rpartition(".")[0]
    found = evidence.seen.inputs[name][0]
    if found is None:
        raise Refusal(f"no tensor went into `{name}`")
    return found


def head_error(head: Head, x_query: Tensor, x_key: Tensor, call: SoftmaxCall) -> tuple[float, bool]:
    """The largest difference of admitted logits, relative to the largest of them or 1; and whether masks differ."""
    theirs = call.logits[:, head.index]
    # Texts and tokens may be one dimension of the inputs.
    x_query, x_key = (x.reshape(len(theirs), -1, x.shape[-1]) if x.dim() == 2 else x for x in (x_query, x_key))
    own = head.logits(x_query, x_key)
    expected = head.admits(torch.arange(own.shape[-2]), torch.arange(own.shape[-1]))
    masks_differ = not bool((expected == admits(theirs)[..., : own.shape[-1]]).all())
    shape = *own.shape[:-1], own.shape[-1] + (head.sink is not None)  # the sink is one more key
    theirs = theirs[..., : shape[-1]]
    seen = admits(theirs)
    if theirs.shape != shape or not seen.any():
        raise Refusal(f"logits of {shape}, where the model has {tuple(theirs.shape)}")
    return largest_gap(head, own, theirs, seen) / max(float(theirs[seen].abs().max()), 1.0), masks_differ


def _norm_differs(norm: Norm | None, x: Tensor, evidence: Evidence) -> str | None:
    """Compare this input with the row's norm: of all norms in the model, the one whose output it is."""
    found = norm_behind(evidence.norms, x)
    if norm is None:
        return None if found is None else f"none in the row, `{found.name}` in the model"
    if found is None:
        return "one in the row, none in the model"
    return None if same(norm(found.x), found.y, 1e-5) else f"another than `{found.name}`"


def same(left: Tensor, right: Tensor, tolerance: float = 1e-6) -> bool:
    """Equal up to rounding, relative to the largest entry."""
    return left.shape == right.shape and bool((left - right).abs().max() <= tolerance * (1 + right.abs().max()))


# -------------------------------------------------------------------------------------------------- beyond equal logits
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
    own = (name for name, _ in calls.evidence.modules[calls.owner].named_parameters())
    names = {name.removesuffix(".weight").removesuffix(".bias") for name in own}
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


def is_plain(call: SoftmaxCall, evidence: Evidence) -> bool:
    """Tell whether the average of values goes as it is into a module with a weight under or next to the attention."""
    near, texts = call.module.rpartition(".")[0], call.logits.shape[0]
    names = [name for name in evidence.seen.inputs if name.startswith(near)]
    names = [name for name in names if isinstance(getattr(evidence.modules.get(name), "weight", None), Tensor)]
    inputs = [x for name in names for x in evidence.seen.inputs[name] if x is not None]
    for left, product in call.averages:
        if product.dim() == 3 and product.shape[0] % texts == 0:
            product = product.unflatten(0, (texts, -1))
        if product.dim() == 4 and call.is_average(left):
            merged = product.transpose(1, 2).flatten(2)
            if any(x.numel() == merged.numel() and same(x.reshape(merged.shape), merged) for x in inputs):
                return True
    return bool(call.averages) and isinstance(evidence.modules.get(call.module), nn.MultiheadAttention)


def later(values: JsonMapping) -> Iterator[str]:
    """Entries of the config, at any depth, whose effect a short text does not show."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from later(value)
        elif value and key in LATER:
            yield f"{LATER[key]} (`{key}`)"
        sizes = value if isinstance(value, list | tuple) else [value]
        if WINDOW.match(str(key)) and any(isinstance(size, int) and size > NUM_TOKENS for size in sizes):
            yield f"a window that the twin's {NUM_TOKENS} tokens do not reach (`{key}`)"


def unheard(evidence: Evidence) -> Iterator[str]:
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
