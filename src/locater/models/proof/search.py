"""The search for a stack's row: first the rows of the tables, then those spelled from what the twin's modules show."""

import itertools
import re
from collections.abc import Iterator

from ..module import find_stack
from ..registry import FAMILIES
from .candidates import Recipe, masked, projections, rotaries, scaled
from .check import Verdict, check
from .evidence import Calls
from .norms import layers_by_rule, norms
from .recipes import row_of


def search(calls: Calls) -> tuple[Recipe, Verdict]:
    """The first recipe that is proven, mask and all; else one proven but for its mask; else the nearest."""
    nearest = but_for_masks = None
    sink = _sink(calls)
    for recipe in itertools.chain(of_tables(calls), spelled(calls)):
        recipe = recipe | (_beneath(sink, recipe["prefixes"]) if sink else {})
        verdict = check(row_of(recipe), calls, hasty=True)
        if verdict.is_proven:
            recipe = recipe | _biases(calls, recipe)
            verdict = check(row_of(recipe), calls)
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


def _beneath(sink: Recipe, prefixes: list[str]) -> Recipe:
    """The sinks' columns; a row's patterns stand behind its prefix."""
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
    only = layers_by_rule(calls.config, sunk)
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
            yield from (masked(calls, recipe) for recipe in scaled(calls, base | dict(rotary=rotary)))
