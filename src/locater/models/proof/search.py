"""The search for a stack's row: first the rows of the tables, then those spelled from what the twin's modules show."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..registry import FAMILIES
from .candidates import Context, Recipe, masked, projections, rotaries, scaled
from .check import Verdict
from .norms import norms


@dataclass(frozen=True)
class Found:
    """A recipe with its verdict, or the nearest that was tried."""

    recipe: Recipe
    verdict: Verdict


def search(context: Context) -> Found:
    """The first recipe that is proven, mask and all; else one proven but for its mask; else the nearest."""
    nearest = but_for_masks = None
    for recipe in itertools.chain(of_tables(context), spelled(context)):
        verdict = context.judge(recipe, hasty=True)
        if verdict.is_proven:
            verdict = context.judge(recipe)
        if verdict.is_proven and not verdict.masks_differ:
            return Found(recipe, verdict)
        if verdict.is_proven:
            but_for_masks = but_for_masks or Found(recipe, verdict)
        elif verdict.error and (nearest is None or verdict.error < nearest.verdict.error):
            nearest = Found(recipe, verdict)
    nothing = f"no projections of queries and keys found in `{context.stack.pattern}`"
    return but_for_masks or nearest or Found({}, Verdict(differs=nothing))


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
    """What stands before this name where it is stored in the stack."""
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
