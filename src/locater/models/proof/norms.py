"""The norms of a stack: which one made the projections' input, and those of queries and keys, by their own numbers."""

import itertools
import re
from typing import Any

from torch import Tensor, nn

from ..config import Config
from .candidates import Recipe, rows_of_module
from .check import input_of
from .evidence import Calls, is_norm, made_by, same
from .recipes import LAYERS


def norms(calls: Calls, base: Recipe) -> Recipe:
    """The columns of all norms: before the projections, and of queries and keys."""
    found = _inner(calls)
    over = _norm_over(calls, base, found["query_norm"])
    for side in ("query_norm", "key_norm"):
        if found[side] is not None:
            found[side] |= dict(only=_only(calls, found[side]["name"]))
    across = base["block"] == "cross"
    late = all(found[side] and _is_late(calls, found[side]) for side in ("query_norm", "key_norm"))
    outer = dict(input_norm=_input_norm(calls, base["query"]), norm_over=over, turns_first=late)
    return found | outer | dict(key_input_norm=_input_norm(calls, base["key"]) if across else None)


def _inner(calls: Calls) -> dict[str, Any]:
    """Norms inside the attention module, distinguished by their names; one for both counts twice."""
    found: dict[str, Any] = dict(query_norm=None, key_norm=None)
    for name, module in calls.evidence.modules.items():
        inside = name.startswith(f"{calls.owner}.") and is_norm(name, module)
        if not inside or (at := norm_at(calls, name)) is None:
            continue
        short = name.removeprefix(f"{calls.owner}.")
        shared = re.search(r"qk|query_key", short)
        if shared or re.search(r"(^|[._])q|query", short):
            found["query_norm"] = dict(at)
        if shared or re.search(r"(^|[._])k|key", short):
            found["key_norm"] = dict(at)
    return found


def _norm_over(calls: Calls, base: Recipe, norm: Recipe | None) -> str:
    """Over one head or over all: by the size of what the norm is given."""
    if norm is None or base["fused"]:
        return "head"
    evidence = calls.evidence
    given = evidence.seen.inputs[evidence.module_of(norm["name"], calls.first)][0]
    rows, _ = rows_of_module(calls, evidence.module_of(base["query"], calls.first))
    whole = given is not None and given.dim() == 3 and given.shape[-1] == rows
    return "projection" if whole else "head"


def _only(calls: Calls, pattern: str) -> str:
    """The rule for layers in which the norm really ran."""
    evidence = calls.evidence
    ran = {layer: bool(evidence.seen.inputs.get(evidence.module_of(pattern, layer))) for layer in calls.by_layer}
    return layers_by_rule(calls.config, ran) or "every layer"


def layers_by_rule(config: Config, wanted: dict[int, bool]) -> str | None:
    """The rule for layers that holds in these and in no others."""
    return next((name for name, rule in LAYERS.items() if _holds(rule, config, wanted)), None)


def _is_late(calls: Calls, norm: Recipe) -> bool:
    """Behind the rotation: it takes vectors as long as a projection's, in their places, that are not these themselves.

    Without gains the order makes no difference, and the usual one is taken.
    """
    evidence, owner = calls.evidence, calls.owner
    inputs = evidence.seen.inputs.get(evidence.module_of(norm["name"], calls.first), ()) if not norm["plain"] else ()
    given = next((x for x in inputs if x is not None and x.dim() == 4), None)
    if given is None:
        return False
    for name, module in evidence.modules[owner].named_modules():
        outputs = evidence.seen.outputs.get(f"{owner}.{name}", ()) if isinstance(module, nn.Linear) else ()
        for made in (y for y in outputs if y is not None and y.numel() == given.numel()):
            apart = made.reshape(len(made), -1, made.shape[-1] // given.shape[-1], given.shape[-1])
            for one in (apart, apart.transpose(1, 2)):
                if one.shape == given.shape and same(one.norm(dim=-1), given.norm(dim=-1), 1e-5):
                    return not same(one, given, 1e-5)
    return False


def _holds(rule: Any, config: Config, wanted: dict[int, bool]) -> bool:
    try:
        return all(bool(rule(config, layer)) == value for layer, value in wanted.items())
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def norm_at(calls: Calls, name: str) -> Recipe | None:
    """Kind, epsilon and gain of a norm, by its own input and output; None where no kind explains them."""
    evidence = calls.evidence
    module = evidence.modules[name]
    given, made = (next(iter(side.get(name, ())), None) for side in (evidence.seen.inputs, evidence.seen.outputs))
    if given is None or made is None or given.shape != made.shape:
        return None
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    names = ("eps", "variance_epsilon", "epsilon", "norm_eps")
    epsilon = next((value for key in names if isinstance(value := getattr(module, key, None), float)), 1e-6)
    if weight is not None and weight.shape[-1] != given.shape[-1]:
        return None
    for kind, plus_one in itertools.product(("rms", "layer", "l2"), (False, True)):
        y = _normalised(given, kind, epsilon)
        y = y if weight is None else y * (1 + weight if plus_one else weight)
        if same(y if bias is None else y + bias, made, 1e-5):
            numbers = dict(epsilon=epsilon, plus_one=plus_one, plain=weight is None, biased=bias is not None)
            return dict(kind=kind, name=calls.pattern(name), **numbers)
    return None


def _normalised(x: Tensor, kind: str, epsilon: float) -> Tensor:
    y = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    square = y.square().sum(-1, keepdim=True) if kind == "l2" else y.square().mean(-1, keepdim=True)
    return y * (square + epsilon).rsqrt()


def _input_norm(calls: Calls, pattern: str) -> Recipe | None:
    """The norm whose output the projection takes, in every layer: its own, or the last of the layer before."""
    evidence = calls.evidence
    by_layer = {n: made_by(evidence, input_of(evidence, evidence.existing(pattern, n))) for n in calls.by_layer}
    last = max(by_layer)
    name = by_layer[last]
    if name is None or (at := norm_at(calls, name)) is None:
        return None
    for token, shift in (("{layer}", 0), ("{previous}", 1)):
        short = evidence.with_number(name, last - shift, token)
        fits = {layer: short.format(layer=layer, previous=layer - 1) == own for layer, own in by_layer.items()}
        if token in short and all(fits[layer] for layer in by_layer if layer > 0):
            first = "" if fits.get(0, True) else by_layer[0] and evidence.file_module(by_layer[0])
            return at | dict(name=evidence.pattern(name, last - shift, token), first=first)
    same_for_all = all(own == name for own in by_layer.values())
    return at | dict(name=evidence.file_module(name)) if same_for_all else None
