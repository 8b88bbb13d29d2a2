"""The search for a stack's row: first the rows of the tables, then those spelled from what the twin's modules show."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..live.explain import explain_norm
from ..module import find_stack
from ..registry import FAMILIES
from .candidates import Recipe, projections, rotaries, rows_of_module, with_mask, with_scale
from .check import Verdict, check_row, input_of
from .evidence import Calls, is_norm, norm_behind, same
from .recipes import LAYERS, row_of


def find_recipe(calls: Calls) -> tuple[Recipe, Verdict]:
    """The first recipe that is proven, mask and all; else one proven but for its mask; else the nearest."""
    nearest = but_for_masks = None
    sink = _sink(calls)
    for recipe in itertools.chain(of_tables(calls), spelled(calls)):
        recipe = recipe | (_strip_prefixes(sink, recipe["prefixes"]) if sink else {})
        verdict = check_row(
            row_of(recipe), calls, hasty=True
        )  # one head first: all of them for each candidate take minutes
        if verdict.is_proven:
            recipe = recipe | _biases(calls, recipe)
            # Without the check of every layer and head, a recipe that fits the first head by chance would be taken.
            verdict = check_row(row_of(recipe), calls)
        if verdict.is_proven and not verdict.masks_differ:
            return recipe, verdict
        if verdict.is_proven:
            but_for_masks = but_for_masks or (recipe, verdict)
        elif verdict.error and (nearest is None or verdict.error < nearest[1].error):
            nearest = recipe, verdict
    return but_for_masks or nearest or ({}, Verdict(differs=_nothing(calls)))


def _biases(calls: Calls, recipe: Recipe) -> Recipe:
    """Find whether the twin's queries and keys have biases: a file that lacks them, or has more, is not the model's."""
    stack = find_stack(row_of(recipe), calls.evidence.config, calls.evidence.tensors)
    module = next(module for module in stack if module.number == calls.first)  # it was proven
    names = dict(query_bias=module.query_name, key_bias=module.key_name)
    return {column: module.stored(name, "bias") is not None for column, name in names.items()}


def _strip_prefixes(sink: Recipe, prefixes: list[str]) -> Recipe:
    """Strip the row's prefixes from the names of the sinks."""
    names = sink["sink"].split("|")
    short = [name.removeprefix(prefix) for prefix in prefixes for name in names if name.startswith(prefix)]
    return sink | dict(sink="|".join(dict.fromkeys(short)))


def _sink(calls: Calls) -> Recipe:
    """Find the parameter of an extra softmax column: a number for each head, if there is only one such."""
    evidence = calls.evidence
    sunk = {layer: seen[0].is_sunk for layer, seen in calls.by_layer.items()}
    layer = next((layer for layer, is_sunk in sunk.items() if is_sunk), None)
    if layer is None:
        return {}
    owner, num_heads = calls.name(layer), calls.by_layer[layer][0].logits.shape[1]
    named = evidence.modules[owner].named_parameters(recurse=False)
    own = [name for name, value in named if value.numel() == num_heads]
    only = calls.rule(LAYERS, list(sunk.values()))
    return dict(sink=evidence.pattern(f"{owner}.{own[0]}", layer), sink_only=only) if len(own) == 1 and only else {}


def _nothing(calls: Calls) -> str:
    """Explain why not even one candidate gave logits to compare."""
    pair = next(projections(calls), None)
    if pair is None:
        return "no two projections in it have the rows of its heads"
    names = " and ".join(dict.fromkeys(name.split("|")[0].rpartition(".")[2] for name in (pair["query"], pair["key"])))
    return f"its logits are no scaled product of {names}, turned, normed or plain"


def of_tables(calls: Calls) -> Iterator[Recipe]:
    """Every row of the tables whose query is stored under this stack's modules."""
    for family in FAMILIES:
        for number, row in enumerate(family.attention):
            for alternative in row.query.split("|"):
                if "{" in alternative.replace("{layer}", ""):
                    continue  # a name of more numbers than the layer's
                query = alternative.format(layer=calls.first)
                for prefix in sorted(_found_before(calls, query)):
                    prefixes = _prefixes(calls, prefix, query)
                    yield dict(family=family.name, row=number, prefixes=prefixes, config=calls.path)


def _found_before(calls: Calls, query: str) -> set[str]:
    """List the prefixes of this name where it is stored in the stack."""
    names, evidence = re.compile(rf"^(.*?){re.escape(query)}[._]weight$"), calls.evidence
    found = ((match[1], match[1] + query) for name in evidence.tensors.names if (match := names.match(name)))
    inside = f"{calls.owner}."
    return {prefix for prefix, name in found if evidence.module_names.get(name, name).startswith(inside)}


def _prefixes(calls: Calls, prefix: str, query: str) -> list[str]:
    """Files and live models may call it differently, and hold the model with its head or without."""
    own = calls.evidence.module_names.get(prefix + query, prefix + query)
    both = [prefix, own.removesuffix(query)] if own.endswith(query) else [prefix]
    return list(dict.fromkeys([*both, *(calls.evidence.other_form(one) for one in both)]))


def spelled(calls: Calls) -> Iterator[Recipe]:
    """Projections with their norms, then positions, then scale: each step keeps what the step before has settled."""
    for base in projections(calls):
        base = base | norms(calls, base) | dict(lookback="none", lookahead="both ways", softcap=None)
        for rotary in rotaries(calls):
            yield from (with_mask(calls, recipe) for recipe in with_scale(calls, base | dict(rotary=rotary)))


# ------------------------------------------------------------------------------------------------- the norms of a stack
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
        if not inside or (at := _norm_recipe(calls, name)) is None:
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
    ran = [bool(evidence.seen.inputs.get(evidence.module_of(pattern, layer))) for layer in calls.by_layer]
    return calls.rule(LAYERS, ran) or "every layer"


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


def _norm_recipe(calls: Calls, name: str) -> Recipe | None:
    """Kind, epsilon and gain of a norm, by its own input and output; None where no kind explains them."""
    evidence = calls.evidence
    module = evidence.modules[name]
    given, made = (next(iter(side.get(name, ())), None) for side in (evidence.seen.inputs, evidence.seen.outputs))
    if given is None or made is None or given.shape != made.shape:
        return None
    names = ("eps", "variance_epsilon", "epsilon", "norm_eps")
    epsilon = next((value for key in names if isinstance(value := getattr(module, key, None), float)), 1e-6)
    weight = getattr(module, "weight", None)
    if weight is not None and weight.shape[-1] != given.shape[-1]:
        return None
    found = explain_norm(module, given, [epsilon], ("rms", "layer", "l2"), lambda own: same(own, made, 1e-5))
    if found is None:
        return None
    numbers = ("kind", "epsilon", "plus_one", "plain", "biased")
    return {column: getattr(found, column) for column in numbers} | dict(name=calls.pattern(name))


def _input_norm(calls: Calls, pattern: str) -> Recipe | None:
    """The norm whose output the projection takes, in every layer: its own, or the last of the layer before."""
    evidence = calls.evidence
    by_layer = {n: norm_behind(evidence, input_of(evidence, evidence.module_of(pattern, n))) for n in calls.by_layer}
    last = max(by_layer)
    name = by_layer[last]
    if name is None or (at := _norm_recipe(calls, name)) is None:
        return None
    for token, shift in (("{layer}", 0), ("{previous}", 1)):
        short = evidence.with_number(name, last - shift, token)
        fits = {layer: short.format(layer=layer, previous=layer - 1) == own for layer, own in by_layer.items()}
        if token in short and all(fits[layer] for layer in by_layer if layer > 0):
            first = "" if fits.get(0, True) else by_layer[0] and evidence.file_module(by_layer[0])
            return at | dict(name=evidence.pattern(name, last - shift, token), first=first)
    same_for_all = all(own == name for own in by_layer.values())
    return at | dict(name=evidence.file_module(name)) if same_for_all else None
