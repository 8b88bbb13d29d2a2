"""Candidates for a stack's row, spelled from what its modules show: projections, norms, positions, scale, mask.

Whatever is guessed from names here is only a candidate: `check` compares its logits with the model's own.
"""

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.masks import admits
from ...head import admitted
from ...records import Json
from ..config import Config
from ..live.explicit import rows_of_weight
from ..module import HeadShape, find_stack
from ..reader import read_heads
from .check import input_of, own_logits
from .evidence import Calls, same
from .recipes import CAPS, FRACTIONS, HEADS, KEY_HEADS, LAYERS, SCALES, SIZES, WINDOWS, row_of

QUERY = re.compile(r"(^|_)(q|query|wq|queries)($|_)|query")
KEY = re.compile(r"(^|_)(k|key|wk|keys)($|_)|key")
FUSED = re.compile(r"qkv|query_key_value|c_attn|in_proj|att_proj", re.IGNORECASE)
MOST_PAIRS = 4  # of projections that are tried, the likeliest first
DEPTHS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth",
    "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_layers",
)  # fmt: skip
Recipe = Json


def projections(calls: Calls) -> Iterator[Recipe]:
    """Pairs of linear maps inside the attention module, or one map that holds both, the likeliest names first."""
    linear = list(_linear(calls))
    num_heads = calls.num_heads
    for query, key in sorted(itertools.permutations(linear, 2), key=_unlikeness)[:MOST_PAIRS]:
        yield from _separate(calls, query, key)
    for one in sorted(linear, key=lambda name: not FUSED.search(name))[:MOST_PAIRS]:
        yield from _together(calls, one, num_heads)


def _linear(calls: Calls) -> Iterator[str]:
    """Names beneath the owner of modules that project its input, and `in_proj` of nn.MultiheadAttention."""
    owner, evidence = calls.owner, calls.evidence
    for name, module in evidence.modules.items():
        if not (name == owner or name.startswith(f"{owner}.")) or not evidence.seen.inputs.get(name):
            continue
        if isinstance(module, nn.MultiheadAttention):
            yield f"{name}.in_proj"
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            yield name


def _unlikeness(pair: tuple[str, str]) -> tuple[bool, bool]:
    query, key = (name.rpartition(".")[2] for name in pair)
    return not QUERY.search(query), not KEY.search(key)


def rows_of_module(calls: Calls, name: str) -> tuple[int, bool]:
    """Rows of a projection as (out, in), and whether it is stored the other way."""
    module = calls.evidence.modules.get(name)
    if module is None:
        owner: Any = calls.evidence.modules[name.rpartition(".")[0]]
        return owner.in_proj_weight.shape[0], False
    return rows_of_weight(module)


def _separate(calls: Calls, query: str, key: str) -> Iterator[Recipe]:
    transposed = rows_of_module(calls, query)[1]
    for gated in (False, True):
        shapes = [_apart(calls, query, key, layer, gated=gated) for layer in calls.by_layer]
        shape = None if None in shapes else _shape(calls, query, [one for one in shapes if one is not None])
        if shape is not None:
            yield _recipe(calls, query, key, shape | dict(fused=None, gated=gated, transposed=transposed))


def _apart(calls: Calls, query: str, key: str, layer: int, *, gated: bool) -> HeadShape | None:
    """Heads, key heads and their size in one layer, by the rows that its projections have."""
    names = [calls.name(layer) + name.removeprefix(calls.owner) for name in (query, key)]
    if not all(calls.evidence.seen.inputs.get(name.removesuffix(".in_proj")) for name in names):
        return None
    rows, key_rows = (rows_of_module(calls, name)[0] for name in names)
    num_heads = calls.by_layer[layer][0].logits.shape[1]
    d_head, rest = divmod(rows, num_heads * (2 if gated else 1))
    if rest or not d_head or key_rows % d_head or num_heads % (key_rows // d_head):
        return None
    return HeadShape(num_heads, key_rows // d_head, d_head)


def _together(calls: Calls, name: str, num_heads: int) -> Iterator[Recipe]:
    rows, transposed = rows_of_module(calls, name)
    for num_key_heads in dict.fromkeys((num_heads, num_heads // 2, 1)):
        if not num_key_heads or num_heads % num_key_heads or rows % (num_heads + 2 * num_key_heads):
            continue
        found = HeadShape(num_heads, num_key_heads, rows // (num_heads + 2 * num_key_heads))
        shape = _shape(calls, name, [found] * len(calls.by_layer))
        if shape is None:
            continue
        for fused in ("qkv", "grouped"):
            yield _recipe(calls, name, name, shape | dict(fused=fused, gated=False, transposed=transposed))


def _recipe(calls: Calls, query: str, key: str, shape: Recipe) -> Recipe:
    names = dict(query=calls.pattern(query), key=calls.pattern(key), block=_block(calls, query, key))
    return names | shape | dict(prefixes=[""], config=calls.path)


def _shape(calls: Calls, query: str, shapes: list[HeadShape]) -> Recipe | None:
    """The config's entries that hold these numbers, layer by layer; None where one is in no entry."""
    width = input_of(calls.evidence, query).shape[-1]
    num_heads, num_key_heads, sizes = (list(numbers) for numbers in zip(*shapes, strict=True))
    heads, key_heads = calls.rule(HEADS, num_heads), calls.rule(KEY_HEADS, num_key_heads)
    key_heads = 1 if key_heads is None and set(num_key_heads) == {1} and 1 not in num_heads else key_heads
    layers = next((name for name in DEPTHS if calls.config.get(name) == calls.length), None)
    if layers is None and list(calls.by_layer) != list(range(calls.length)):
        layers = calls.length
    if "{layer}" not in calls.place:
        layers = 1
    even = [width // number for number in num_heads if width % number == 0]
    size = calls.rule(SIZES, sizes)  # that of the width by the heads is None in any layer
    size = "width/heads" if size is None and even == sizes else size
    if heads is None or size is None or (key_heads is None and num_key_heads != num_heads):
        return None
    return dict(heads=heads, key_heads=key_heads, d_head=size, layers=layers)


def _block(calls: Calls, query: str, key: str) -> str:
    left, right = input_of(calls.evidence, query), input_of(calls.evidence, key)
    if left.shape != right.shape or not torch.equal(left, right):
        return "cross"
    mask = admits(calls.by_layer[calls.first][0].own)
    causal = mask.shape[-2] > 1 and not bool(mask[..., 0, 1:].any())
    seen = re.search(r"vision|visual|image|pixel", calls.place)
    if seen or (not causal and calls.evidence.model.main_input_name == "pixel_values"):
        return "vision"
    return "decoder" if causal else "encoder"


# --------------------------------------------------------------------------------------------------------- positions
def rotaries(calls: Calls) -> Iterator[Recipe | None]:
    """None first; then what the config's entries allow."""
    config = calls.config
    yield None
    if not any(re.search("rope|rotary", key) for key in config.values):
        return
    nested = any(isinstance(value, dict) for value in (config.get("rope_parameters") or {}).values())
    rules = [name for name, rule in LAYERS.items() if any(calls.values(rule))]
    for backward, interleaved, only in itertools.product((False, True), (False, True), rules):
        turn = dict(backward=True) if backward else {}
        shared = turn | dict(interleaved=interleaved, only=only, parameters="by layer type" if nested else "one")
        yield from (shared | part for part in _parts(config))


def _parts(config: Config) -> Iterator[Recipe]:
    """Yield recipes for the rotated part of a head."""
    yield from (dict(fraction=name) for name in FRACTIONS if not name or config.get(name) is not None)
    if config.get("rotary_dim"):
        yield dict(num_dims="rotary_dim")
    if config.get("qk_rope_head_dim"):
        yield dict(num_dims="qk_rope_head_dim", start="qk_nope_head_dim")
        yield dict(num_dims="qk_rope_head_dim")
    yield from (dict(literal_fraction=part) for part in (0.5, 0.25))


# ------------------------------------------------------------------------------------------------------------- scale
def with_scale(calls: Calls, base: Recipe) -> Iterator[Recipe]:
    """The rule for the scale whose number the logits show; with a soft-cap no number shows, and all are tried."""
    # The twin's own number picks the rule: a rule that fits its sizes by chance would be wrong at the model's.
    known = [name for name, cell in SCALES.items() if cell is None or calls.value(cell) is not None]
    number = _measured_scale(calls, base | dict(scale="1"))
    if number is None:
        caps = [cap for cap in CAPS if calls.config.get(cap)]
        yield from (base | dict(scale=name, softcap=cap) for cap in caps for name in known)
        return
    d_head = calls.value(SIZES[base["d_head"]])
    if d_head is None:
        query = calls.evidence.module_of(base["query"], calls.first)
        d_head = input_of(calls.evidence, query).shape[-1] // calls.value(HEADS[base["heads"]])
    for name in known:
        stated = d_head**-0.5 if SCALES[name] is None else calls.value(SCALES[name])
        if math.isclose(stated, number, rel_tol=1e-5):
            yield base | dict(scale=name)


def _measured_scale(calls: Calls, recipe: Recipe) -> float | None:
    """The factor between plain products and the model's logits; None where there is no such factor."""
    evidence, layer = calls.evidence, calls.first
    try:
        stack = find_stack(row_of(recipe), evidence.config, evidence.tensors)
        built = next((read_heads(module) for module in stack if module.number == layer), None)
        if built is None or not built.heads:
            return None
        theirs = calls.by_layer[layer][0].logits[:, 0]
        inputs = (input_of(evidence, name) for name in (built.query_name, built.key_name))
        own = own_logits(built.heads[0], *inputs, num_texts=len(theirs))
    except (ValueError, RuntimeError, IndexError, KeyError, TypeError):
        return None
    theirs = theirs[..., : own.shape[-1]]
    return _factor(own, theirs) if own.shape == theirs.shape else None


def _factor(own: Tensor, theirs: Tensor) -> float | None:
    seen = admits(theirs)
    if bool((theirs.masked_fill(~seen, -torch.inf).amax(-1) <= 1e-6).all()):  # the model subtracts its largest logit
        number = seen.sum(-1, keepdim=True)
        own, theirs = (part - part.masked_fill(~seen, 0).sum(-1, keepdim=True) / number for part in (own, theirs))
    own, theirs = own[seen], theirs[seen]
    factor = float((own @ theirs) / (own @ own))
    return factor if same(own * factor, theirs, 1e-4) else None


# -------------------------------------------------------------------------------------------------------------- mask
def with_mask(calls: Calls, recipe: Recipe) -> Recipe:
    """The rule for causality and window that admits what the model admits; plain causality where none does."""
    masks = [admits(seen[0].own)[:, 0] for seen in calls.by_layer.values()]
    for ahead, back in itertools.product(("causal", "both ways", "as far as back"), WINDOWS):
        reaches = calls.values(WINDOWS[back])
        limits = {"causal": [0] * len(masks), "both ways": [None] * len(masks), "as far as back": reaches}[ahead]
        if reaches and all(map(_is_mask, masks, reaches, limits)):
            return recipe | dict(lookback=back, lookahead=ahead)
    causal = recipe["block"] != "cross" and not any(bool(mask[:, 0, 1:].any()) for mask in masks)
    return recipe | dict(lookback="none", lookahead="causal" if causal else "both ways")


def _is_mask(mask: Tensor, lookback: int | None, lookahead: int | None) -> bool:
    distance = torch.arange(mask.shape[-2])[:, None] - torch.arange(mask.shape[-1])
    return bool((mask == admitted(distance, lookback=lookback, lookahead=lookahead)).all())
