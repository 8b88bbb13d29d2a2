"""The row of a stack: one of the tables, or what the finder found in every layer, its numbers as entries of the config.

Whatever is guessed from names here is only a candidate: `check` compares its logits with the model's own.
"""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from ...records import Json
from ..config import Config
from ..module import HeadShape, find_stack
from ..registry import FAMILIES
from ..schema import Layout, NormAt, Starts
from ..slices import first_rows
from .check import Verdict, check_row
from .evidence import Calls
from .recipes import CAPS, FRACTIONS, HEADS, KEY_HEADS, LAYERS, SCALES, SIZES, WINDOWS, row_of

DEPTHS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth",
    "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_layers",
)  # fmt: skip
Recipe = Json


def find_recipe(calls: Calls) -> Verdict:
    """Judge the first recipe that is proven, mask and all; else one proven but for its mask; else the nearest."""
    nearest = but_for_masks = None
    sink = _sink(calls)
    for recipe in itertools.chain(of_tables(calls), lifted(calls)):
        recipe = recipe | (_strip_prefixes(sink, recipe["prefixes"]) if sink else {})
        # One head first: all of them for each candidate take minutes.
        verdict = check_row(row_of(recipe), calls, hasty=True)
        if verdict.is_proven:
            recipe = recipe | _biases(calls, recipe)
            # Without the check of every layer and head, a recipe that fits the first head by chance would be taken.
            verdict = check_row(row_of(recipe), calls)
        verdict.recipe = recipe
        if verdict.is_proven and not verdict.masks_differ:
            return verdict
        if verdict.is_proven:
            but_for_masks = but_for_masks or verdict
        elif verdict.error and (nearest is None or verdict.error < nearest.error):
            nearest = verdict
    return but_for_masks or nearest or Verdict(differs=calls.reason or "its sizes are in no entries of its config")


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
    """The parameter of an extra softmax column, as the finder found it, and the layers that have one."""
    names = {layer: seen[0].found.row.sink if seen[0].is_sunk else None for layer, seen in calls.by_layer.items()}
    layer, name = next(((layer, name) for layer, name in names.items() if name), (0, None))
    only = name and calls.rule(LAYERS, [name is not None for name in names.values()])
    return dict(sink=calls.evidence.pattern(name, layer), sink_only=only) if name and only else {}


# ------------------------------------------------------------------------------------------------ rows of the tables
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


# ----------------------------------------------------------------------------------------------- what the finder found
def lifted(calls: Calls) -> Iterator[Recipe]:
    """Yield recipes of what was found in each layer, one for each way in which entries may speak of the rotary part."""
    rows = calls.rows
    if not rows or (sizes := _sizes(calls, rows)) is None or (layout := _layout(rows[0])) is None:
        return
    one = rows[0]
    names = dict(query=calls.pattern(one.query), key=calls.pattern(one.key), block=_block(calls, one))
    base = names | sizes | layout | _norms(calls, rows) | _mask(calls, rows)
    base |= dict(prefixes=[""], config=calls.path, transposed=one.transposed)
    for rotary in _rotaries(calls, rows):
        yield from (base | dict(rotary=rotary) | scale for scale in _scales(calls, rows))


def _sizes(calls: Calls, rows: Sequence[Any]) -> Recipe | None:
    """The config's entries that hold these numbers, layer by layer; None where one is in no entry."""
    num_heads, num_key_heads, sizes = (
        [getattr(row, cell) for row in rows] for cell in ("heads", "key_heads", "d_head")
    )
    heads, key_heads = calls.rule(HEADS, num_heads), calls.rule(KEY_HEADS, num_key_heads)
    key_heads = 1 if key_heads is None and set(num_key_heads) == {1} and 1 not in num_heads else key_heads
    layers = next((name for name in DEPTHS if calls.config.get(name) == calls.length), None)
    if layers is None and list(calls.by_layer) != list(range(calls.length)):
        layers = calls.length
    if "{layer}" not in calls.place:
        layers = 1
    even = [row.d_model // row.heads for row in rows if row.d_model % row.heads == 0]
    size = calls.rule(SIZES, sizes)  # that of the width by the heads is None in any layer
    size = "width/heads" if size is None and even == sizes else size
    if heads is None or size is None or (key_heads is None and num_key_heads != num_heads):
        return None
    return dict(heads=heads, key_heads=key_heads, d_head=size, layers=layers)


def _layout(row: Any) -> Recipe | None:
    """The layout that puts heads where they were found."""
    shape = HeadShape(row.heads, row.key_heads, row.d_head)
    plain = [(None, False), (None, True)] if row.query != row.key else []
    for fused, gated in [*plain, *((fused, False) for fused in get_args(Layout))]:
        query, key = first_rows(fused, row.heads, shape, "query"), first_rows(fused, row.key_heads, shape, "key")
        if row.fused in (Starts(tuple(start * (1 + gated) for start in query), tuple(key)), fused):
            return dict(fused=fused, gated=gated)
    return None


def _block(calls: Calls, row: Any) -> str:
    if row.block == "cross":
        return "cross"
    seen = re.search(r"vision|visual|image|pixel", calls.place)
    if seen or (row.lookahead != 0 and calls.evidence.model.main_input_name == "pixel_values"):
        return "vision"
    return row.block


def _norms(calls: Calls, rows: Sequence[Any]) -> Recipe:
    """The columns of all norms: before the projections, and of queries and keys."""
    inner = {side: _inner_norm(calls, [getattr(row, side) for row in rows]) for side in ("query_norm", "key_norm")}
    outer = {
        side: _input_norm(calls, [getattr(row, side) for row in rows]) for side in ("input_norm", "key_input_norm")
    }
    over = next((row.norm_over for row in rows if row.query_norm or row.key_norm), "head")
    return inner | outer | dict(norm_over=over, turns_first=any(row.turns_first for row in rows))


def _recipe(norm: NormAt) -> Recipe:
    return {column: getattr(norm, column) for column in ("kind", "epsilon", "plus_one", "plain", "biased", "single")}


def _inner_norm(calls: Calls, norms: list[NormAt | None]) -> Recipe | None:
    """The norm of queries or keys, and the layers that have it."""
    layer, norm = next(((layer, one) for layer, one in zip(calls.by_layer, norms, strict=True) if one), (0, None))
    if norm is None:
        return None
    only = calls.rule(LAYERS, [one is not None for one in norms]) or "every layer"
    return _recipe(norm) | dict(name=calls.evidence.pattern(norm.name, layer), only=only)


def _input_norm(calls: Calls, norms: list[NormAt | None]) -> Recipe | None:
    """The norm whose output the projection takes, in every layer: its own, or the last of the layer before."""
    evidence, at = calls.evidence, norms[-1]
    by_layer = {layer: norm and norm.name for layer, norm in zip(calls.by_layer, norms, strict=True)}
    if at is None:
        return None
    last = max(by_layer)
    for token, shift in (("{layer}", 0), ("{previous}", 1)):
        short = evidence.with_number(at.name, last - shift, token)
        fits = {layer: short.format(layer=layer, previous=layer - 1) == own for layer, own in by_layer.items()}
        if token in short and all(fits[layer] for layer in by_layer if layer > 0):
            first = "" if fits.get(0, True) else by_layer[0] and evidence.file_module(by_layer[0])
            return _recipe(at) | dict(name=evidence.pattern(at.name, last - shift, token), first=first)
    same_for_all = all(own == at.name for own in by_layer.values())
    return _recipe(at) | dict(name=evidence.file_module(at.name)) if same_for_all else None


def _rotaries(calls: Calls, rows: Sequence[Any]) -> Iterator[Recipe | None]:
    """None where nothing turned; else what the config's entries allow."""
    found = [row.rotary for row in rows]
    if not any(found):
        yield None
        return
    config, only = calls.config, calls.rule(LAYERS, [one is not None for one in found])
    nested = any(isinstance(value, dict) for value in (config.get("rope_parameters") or {}).values())
    interleaved = next(one.interleaved for one in found if one)
    shared = dict(interleaved=interleaved, only=only, parameters="by layer type" if nested else "one")
    for backward, part in itertools.product((False, True), _parts(config) if only else ()):
        yield shared | part | (dict(backward=True) if backward else {})


def _parts(config: Config) -> Iterator[Recipe]:
    """Yield recipes for the rotated part of a head."""
    yield from (dict(fraction=name) for name in FRACTIONS if not name or config.get(name) is not None)
    if config.get("rotary_dim"):
        yield dict(num_dims="rotary_dim")
    yield from (dict(literal_fraction=part) for part in (0.5, 0.25))


def _scales(calls: Calls, rows: Sequence[Any]) -> Iterator[Recipe]:
    """The rules for the scale that give its numbers, and the soft-cap's entry."""
    # The twin's own number picks the rule: a rule that fits its sizes by chance would be wrong at the model's.
    cap = next((name for name in CAPS if rows[0].softcap and _is(calls.config.get(name), rows[0].softcap)), None)
    stated = {name: calls.values(cell) for name, cell in SCALES.items() if cell is not None}
    stated["1/√d_head"] = [row.d_head**-0.5 for row in rows]
    fitting = [name for name in SCALES if stated[name] and all(map(_is, stated[name], (row.scale for row in rows)))]
    for name in fitting or [name for name in SCALES if stated[name]]:  # what turns may have a factor too (YaRN)
        yield dict(scale=name, softcap=cap)


def _is(stated: Any, number: Any) -> bool:
    return isinstance(stated, int | float) and math.isclose(stated, number, rel_tol=1e-5)


def _mask(calls: Calls, rows: Sequence[Any]) -> Recipe:
    """The rule for causality and window with the limits that were found; plain causality where none has them."""
    reaches = [(row.lookback, row.lookahead) for row in rows]
    tokens = [min(seen[0].own.shape[-2:]) for seen in calls.by_layer.values()]
    for ahead, back in itertools.product(("causal", "both ways", "as far as back"), WINDOWS):
        limits = calls.values(WINDOWS[back])
        backs = [
            None if limit is None or limit >= number - 1 else limit
            for limit, number in zip(limits, tokens, strict=False)
        ]
        aheads = {"causal": [0] * len(rows), "both ways": [None] * len(rows), "as far as back": backs}[ahead]
        if backs and list(zip(backs, aheads, strict=True)) == reaches:
            return dict(lookback=back, lookahead=ahead)
    return dict(lookback="none", lookahead="causal" if all(ahead == 0 for _, ahead in reaches) else "both ways")
