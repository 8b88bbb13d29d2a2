"""The search for a stack's row: first the rows of the tables, then those spelled from what the twin's modules show."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..places import Places
from ..registry import FAMILIES
from .candidates import Context, Recipe, masked, projections, rotaries, scaled
from .check import Verdict
from .norms import layers_by_rule, norms
from .recipes import row_of


@dataclass(frozen=True)
class Found:
    """A recipe with its verdict, or the nearest that was tried."""

    recipe: Recipe
    verdict: Verdict


def search(context: Context) -> Found:
    """The first recipe that is proven, mask and all; else one proven but for its mask; else the nearest."""
    nearest = but_for_masks = None
    sink = _sink(context)
    for recipe in itertools.chain(of_tables(context), spelled(context)):
        recipe = recipe | (_beneath(sink, recipe["prefixes"]) if sink else {})
        verdict = context.judge(recipe, hasty=True)
        if verdict.is_proven:
            recipe = recipe | _biases(context, recipe)
            verdict = context.judge(recipe)
        if verdict.is_proven and not verdict.masks_differ:
            return Found(recipe, verdict)
        if verdict.is_proven:
            but_for_masks = but_for_masks or Found(recipe, verdict)
        elif verdict.error and (nearest is None or verdict.error < nearest.verdict.error):
            nearest = Found(recipe, verdict)
    return but_for_masks or nearest or Found({}, Verdict(differs=_nothing(context)))


def _biases(context: Context, recipe: Recipe) -> Recipe:
    """Find whether the twin's queries and keys have biases: a file that lacks them, or has more, is not the model's."""
    places = Places.find(row_of(recipe), context.whole, context.evidence.tensors)
    assert places is not None  # it was proven
    names = dict(query_bias=places.row.query, key_bias=places.row.key)
    stored = {column: places.name(pattern, context.first) for column, pattern in names.items()}
    return {column: places.stored(module, "bias") is not None for column, module in stored.items()}


def _beneath(sink: Recipe, prefixes: list[str]) -> Recipe:
    """The sinks' columns; a row's patterns stand behind its prefix."""
    names = sink["sink"].split("|")
    short = [name.removeprefix(prefix) for prefix in prefixes for name in names if name.startswith(prefix)]
    return sink | dict(sink="|".join(dict.fromkeys(short)))


def _sink(context: Context) -> Recipe:
    """Find the parameter of an extra softmax column: a number for each head, if there is only one such."""
    stack, evidence = context.stack, context.evidence
    sunk = {layer: calls[0].is_sunk for layer, calls in stack.calls.items()}
    layer = next((layer for layer, is_sunk in sunk.items() if is_sunk), None)
    if layer is None:
        return {}
    owner, num_heads = stack.name(layer), stack.calls[layer][0].logits.shape[1]
    named = evidence.modules[owner].named_parameters(recurse=False)
    own = [name for name, value in named if value.numel() == num_heads]
    only = layers_by_rule(context.config, sunk)
    return dict(sink=evidence.pattern(f"{owner}.{own[0]}", layer), sink_only=only) if len(own) == 1 and only else {}


def _nothing(context: Context) -> str:
    """Explain why not even one candidate gave logits to compare."""
    pair = next(projections(context), None)
    if pair is None:
        return "no two projections in it have the rows of its heads"
    names = " and ".join(dict.fromkeys(name.split("|")[0].rpartition(".")[2] for name in (pair["query"], pair["key"])))
    return f"its logits are no scaled product of {names}, turned, normed or plain"


def of_tables(context: Context) -> Iterator[Recipe]:
    """Every row of the tables whose query is stored under this stack's modules."""
    for family in FAMILIES:
        for number, row in enumerate(family.attention):
            for alternative in row.query.split("|"):
                if "{" in alternative.replace("{layer}", ""):
                    continue  # a name of more numbers than the layer's
                query = alternative.format(layer=context.first)
                for prefix in sorted(_found_before(context, query)):
                    prefixes = _prefixes(context, prefix, query)
                    yield dict(family=family.name, row=number, prefixes=prefixes, config=context.path)


def _found_before(context: Context, query: str) -> set[str]:
    """List the prefixes of this name where it is stored in the stack."""
    names, evidence = re.compile(rf"^(.*?){re.escape(query)}[._]weight$"), context.evidence
    found = ((match[1], match[1] + query) for name in evidence.tensors.names if (match := names.match(name)))
    inside = f"{context.owner}."
    return {prefix for prefix, name in found if evidence.module_names.get(name, name).startswith(inside)}


def _prefixes(context: Context, prefix: str, query: str) -> list[str]:
    """Files and live models may call it differently, and hold the model with its head or without."""
    own = context.evidence.module_names.get(prefix + query, prefix + query)
    both = [prefix, own.removesuffix(query)] if own.endswith(query) else [prefix]
    return list(dict.fromkeys([*both, *(context.evidence.other_form(one) for one in both)]))


def spelled(context: Context) -> Iterator[Recipe]:
    """Projections with their norms, then positions, then scale: each step keeps what the step before has settled."""
    for base in projections(context):
        base = base | norms(context, base) | dict(lookback="none", lookahead="both ways", softcap=None)
        for rotary in rotaries(context):
            yield from (masked(context, recipe) for recipe in scaled(context, base | dict(rotary=rotary)))
