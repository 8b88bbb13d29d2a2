"""Candidates for a stack's row, spelled from what its modules show: projections, norms, positions, scale, mask.

Whatever is guessed from names here is only a candidate: `check` compares its logits with the model's own.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...records import Json
from ..places import Places, Shape
from ..reader import build_layer
from ..schema import Cell, Config, resolve
from .check import Verdict, check, input_of
from .evidence import Evidence, Stack, admitted, same
from .recipes import CAPS, FRACTIONS, HEADS, KEY_HEADS, LAYERS, SCALES, SIZES, WINDOWS, is_close, row_of

QUERY = re.compile(r"(^|_)(q|query|wq|queries)($|_)|query")
KEY = re.compile(r"(^|_)(k|key|wk|keys)($|_)|key")
FUSED = re.compile(r"qkv|query_key_value|c_attn|in_proj|att_proj", re.IGNORECASE)
MOST_PAIRS = 4  # of projections that are tried, the likeliest first
DEPTHS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth",
    "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_layers",
)  # fmt: skip
Recipe = Json


@dataclass(frozen=True)
class Context:
    """Context that all candidates for a stack share; `path` is the part of the config that describes it."""

    evidence: Evidence
    stack: Stack
    whole: Config
    path: str | None

    @property
    def config(self) -> Config:
        return self.whole.within(self.path)

    @property
    def first(self) -> int:
        return next(iter(self.stack.calls))

    @property
    def owner(self) -> str:
        return self.stack.name(self.first)

    def judge(self, recipe: Recipe, *, hasty: bool = False) -> Verdict:
        return check(row_of(recipe), self.whole, self.evidence, self.stack, hasty=hasty)

    def pattern(self, module: str) -> str:
        return self.evidence.pattern(module, self.first)

    def value(self, cell: Any) -> Any:
        """A cell's value in the first layer; None where the config does not say it."""
        try:
            return resolve(cell, self.config, self.first)
        except (ValueError, LookupError, TypeError):
            return None


def projections(context: Context) -> Iterator[Recipe]:
    """Pairs of linear maps inside the attention module, or one map that holds both, the likeliest names first."""
    linear = list(_linear(context))
    num_heads = context.stack.calls[context.first][0].logits.shape[1]
    for query, key in sorted(itertools.permutations(linear, 2), key=_unlikeness)[:MOST_PAIRS]:
        yield from _separate(context, query, key)
    for one in sorted(linear, key=lambda name: not FUSED.search(name))[:MOST_PAIRS]:
        yield from _together(context, one, num_heads)


def _linear(context: Context) -> Iterator[str]:
    """Names beneath the owner of modules that project its input, and `in_proj` of nn.MultiheadAttention."""
    owner, evidence = context.owner, context.evidence
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


def rows_of_module(context: Context, name: str) -> tuple[int, bool]:
    """Rows of a projection as (out, in), and whether it is stored the other way."""
    module: Any = context.evidence.modules.get(name)
    if module is None:
        owner: Any = context.evidence.modules[name.rpartition(".")[0]]
        return owner.in_proj_weight.shape[0], False
    transposed = type(module).__name__ == "Conv1D"
    return module.weight.shape[1 if transposed else 0], transposed


def _separate(context: Context, query: str, key: str) -> Iterator[Recipe]:
    transposed = rows_of_module(context, query)[1]
    for gated in (False, True):
        shapes = [_apart(context, query, key, layer, gated=gated) for layer in context.stack.calls]
        shape = None if None in shapes else _shape(context, query, [one for one in shapes if one is not None])
        if shape is not None:
            yield _recipe(context, query, key, shape | dict(fused=None, gated=gated, transposed=transposed))


def _apart(context: Context, query: str, key: str, layer: int, *, gated: bool) -> Shape | None:
    """Heads, key heads and their size in one layer, by the rows that its projections have."""
    names = [context.stack.name(layer) + name.removeprefix(context.owner) for name in (query, key)]
    if not all(context.evidence.seen.inputs.get(name.removesuffix(".in_proj")) for name in names):
        return None
    rows, key_rows = (rows_of_module(context, name)[0] for name in names)
    num_heads = context.stack.calls[layer][0].logits.shape[1]
    d_head, rest = divmod(rows, num_heads * (2 if gated else 1))
    if rest or not d_head or key_rows % d_head or num_heads % (key_rows // d_head):
        return None
    return Shape(num_heads, key_rows // d_head, d_head)


def _together(context: Context, name: str, num_heads: int) -> Iterator[Recipe]:
    rows, transposed = rows_of_module(context, name)
    for num_key_heads in dict.fromkeys((num_heads, num_heads // 2, 1)):
        if not num_key_heads or num_heads % num_key_heads or rows % (num_heads + 2 * num_key_heads):
            continue
        found = Shape(num_heads, num_key_heads, rows // (num_heads + 2 * num_key_heads))
        shape = _shape(context, name, [found] * len(context.stack.calls))
        if shape is None:
            continue
        for fused in ("qkv", "grouped"):
            yield _recipe(context, name, name, shape | dict(fused=fused, gated=False, transposed=transposed))


def _recipe(context: Context, query: str, key: str, shape: Recipe) -> Recipe:
    names = dict(query=context.pattern(query), key=context.pattern(key), block=_block(context, query, key))
    return names | shape | dict(prefixes=[""], config=context.path)


def _shape(context: Context, query: str, shapes: list[Shape]) -> Recipe | None:
    """The config's entries that hold these numbers, layer by layer; None where one is in no entry."""
    stack, width = context.stack, input_of(context.evidence, query).shape[-1]
    num_heads, num_key_heads, sizes = (list(numbers) for numbers in zip(*shapes, strict=True))
    heads, key_heads = _rule(context, HEADS, num_heads), _rule(context, KEY_HEADS, num_key_heads)
    key_heads = 1 if key_heads is None and set(num_key_heads) == {1} and 1 not in num_heads else key_heads
    layers = next((name for name in DEPTHS if context.config.get(name) == stack.length), None)
    if layers is None and list(stack.calls) != list(range(stack.length)):
        layers = stack.length
    if "{layer}" not in stack.pattern:
        layers = 1
    even = [width // number for number in num_heads if width % number == 0]
    size = _rule(context, {name: cell for name, cell in SIZES.items() if cell is not None}, sizes)
    size = "width/heads" if size is None and even == sizes else size
    if heads is None or size is None or (key_heads is None and num_key_heads != num_heads):
        return None
    return dict(heads=heads, key_heads=key_heads, d_head=size, layers=layers)


def _rule(context: Context, rules: dict[str, Cell], numbers: list[int]) -> str | None:
    """The first rule that gives these numbers in the layers that attend."""
    return next((name for name, cell in rules.items() if _values(context, cell) == numbers), None)


def _values(context: Context, cell: Cell) -> list[Any]:
    try:
        return [resolve(cell, context.config, layer) for layer in context.stack.calls]
    except (ValueError, LookupError, TypeError, AttributeError):
        return []


def _block(context: Context, query: str, key: str) -> str:
    left, right = input_of(context.evidence, query), input_of(context.evidence, key)
    if left.shape != right.shape or not torch.equal(left, right):
        return "cross"
    mask = admitted(context.stack.calls[context.first][0].own)
    causal = mask.shape[-2] > 1 and not bool(mask[..., 0, 1:].any())
    seen = re.search(r"vision|visual|image|pixel", context.stack.pattern)
    if seen or (not causal and context.evidence.model.main_input_name == "pixel_values"):
        return "vision"
    return "decoder" if causal else "encoder"


# --------------------------------------------------------------------------------------------------------- positions
def rotaries(context: Context) -> Iterator[Recipe | None]:
    """None first; then what the config's entries allow."""
    config = context.config
    yield None
    if not any(re.search("rope|rotary", key) for key in config.values):
        return
    nested = any(isinstance(value, dict) for value in (config.get("rope_parameters") or {}).values())
    rules = [name for name, rule in LAYERS.items() if _is_meant(rule, config, context.stack)]
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


def _is_meant(rule: Any, config: Config, stack: Stack) -> bool:
    """Tell whether the rule can be read from this config, and holds for some layer."""
    try:
        return any([bool(rule(config, layer)) for layer in stack.calls])
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


# ------------------------------------------------------------------------------------------------------------- scale
def scaled(context: Context, base: Recipe) -> Iterator[Recipe]:
    """The rule for the scale whose number the logits show; with a soft-cap no number shows, and all are tried."""
    known = [name for name, cell in SCALES.items() if cell is None or context.value(cell) is not None]
    number = _measured_scale(context, base | dict(scale="1"))
    if number is None:
        caps = [cap for cap in CAPS if context.config.get(cap)]
        yield from (base | dict(scale=name, softcap=cap) for cap in caps for name in known)
        return
    d_head = context.value(SIZES[base["d_head"]])
    if d_head is None:
        query = context.evidence.existing(base["query"], context.first)
        d_head = input_of(context.evidence, query).shape[-1] // context.value(HEADS[base["heads"]])
    for name in known:
        if is_close(float(d_head**-0.5 if SCALES[name] is None else context.value(SCALES[name])), number):
            yield base | dict(scale=name)


def _measured_scale(context: Context, recipe: Recipe) -> float | None:
    """The factor between plain products and the model's logits; None where there is no such factor."""
    evidence, layer = context.evidence, context.first
    try:
        places = Places.find(row_of(recipe), context.whole, evidence.tensors)
        built = build_layer(places, layer) if places is not None and layer in places.layers else None
        if built is None or not built.heads:
            return None
        theirs = context.stack.calls[layer][0].logits[:, 0]
        inputs = (input_of(evidence, name) for name in (built.query_name, built.key_name))
        x_query, x_key = (x.reshape(len(theirs), -1, x.shape[-1]) if x.dim() == 2 else x for x in inputs)
        own = built.heads[0].logits(x_query, x_key)
    except (ValueError, RuntimeError, IndexError, KeyError, TypeError):
        return None
    theirs = theirs[..., : own.shape[-1]]
    return _factor(own, theirs) if own.shape == theirs.shape else None


def _factor(own: Tensor, theirs: Tensor) -> float | None:
    seen = admitted(theirs)
    if bool((theirs.masked_fill(~seen, -torch.inf).amax(-1) <= 1e-6).all()):  # the model subtracts its largest logit
        number = seen.sum(-1, keepdim=True)
        own, theirs = (part - part.masked_fill(~seen, 0).sum(-1, keepdim=True) / number for part in (own, theirs))
    own, theirs = own[seen], theirs[seen]
    factor = float((own @ theirs) / (own @ own))
    return factor if same(own * factor, theirs, 1e-4) else None


# -------------------------------------------------------------------------------------------------------------- mask
def masked(context: Context, recipe: Recipe) -> Recipe:
    """The rule for causality and window that admits what the model admits; plain causality where none does."""
    masks = {layer: admitted(calls[0].own)[:, 0] for layer, calls in context.stack.calls.items()}
    for ahead, back in itertools.product(("causal", "both ways", "as far as back"), WINDOWS):
        if all(_is_mask(context, back, ahead, layer, mask) for layer, mask in masks.items()):
            return recipe | dict(lookback=back, lookahead=ahead)
    causal = recipe["block"] != "cross" and not any(bool(mask[:, 0, 1:].any()) for mask in masks.values())
    return recipe | dict(lookback="none", lookahead="causal" if causal else "both ways")


def _is_mask(context: Context, back: str, ahead: str, layer: int, mask: Tensor) -> bool:
    try:
        reach = resolve(WINDOWS[back], context.config, layer)
    except ValueError:
        return False
    limit = {"causal": 0, "both ways": None, "as far as back": reach}[ahead]
    distance = torch.arange(mask.shape[-2])[:, None] - torch.arange(mask.shape[-1])[None]
    own = torch.ones_like(distance, dtype=torch.bool)
    if reach is not None:
        own &= distance <= reach
    if limit is not None:
        own &= -distance <= limit
    return bool((mask == own).all())
