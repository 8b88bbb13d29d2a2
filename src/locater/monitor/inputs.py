"""Attention that goes through no kernel that can be seen: from what its module was given, to what its heads may see."""

import inspect
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Mask, Rule
from ..attention.masks import admits, first_of_segment, plain_mask
from ..head import Block
from ..models.module import AttentionModule
from ..projections import whole
from .tally import Mode

Positions = tuple[Tensor, Tensor]
SELF_NAMES, CROSS_NAMES = ("attention_mask", "mask"), ("encoder_attention_mask", "attention_mask", "mask")
CACHES = ("past_key_values", "past_key_value")


def arguments(module: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> dict[str, Any]:
    """A call's arguments by name, as far as the signature tells."""
    try:  # the class's own signature: wrappers put in front of a single module often hide it
        bound = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
    except (TypeError, ValueError):
        return dict(kwargs)
    bound.pop("self", None)
    further = bound.pop("kwargs", {})
    return {**bound, **further} if isinstance(further, Mapping) else dict(bound)


@dataclass
class ModuleInputs:
    """One run of an attention module: the inputs of its query and key projections as they come by."""

    given: dict[str, Any]
    is_flash: bool = False
    x_query: Tensor | None = None
    x_key: Tensor | None = None
    key_valid: Tensor | None = None
    was_seen: bool = False  # by its kernel's call, so that nothing is left to reconstruct

    @classmethod
    def of(cls, module: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> "ModuleInputs":
        """A run that begins; torch's own module is given its queries and keys, texts first or tokens first."""
        is_flash = "flash" in str(getattr(getattr(module, "config", None), "_attn_implementation", ""))
        inputs = cls(arguments(module, args, kwargs), is_flash)
        sides: list[Any] = [inputs.given.get("query"), inputs.given.get("key")]
        if isinstance(module, nn.MultiheadAttention) and all(isinstance(side, Tensor) for side in sides):
            x_query, x_key = (whole(side.detach()) for side in sides)
            if x_query.dim() == 2:
                x_query, x_key = x_query[None], x_key[None]
            elif not module.batch_first:
                x_query, x_key = x_query.transpose(0, 1), x_key.transpose(0, 1)
            inputs.x_query, inputs.x_key = x_query, x_key
        return inputs


@dataclass
class WatchedPass:
    """A forward pass under way: the model's own arguments, the modules that are running, how often each has run."""

    given: dict[str, Any]
    has_cached_keys: bool
    mode: Mode = "training"
    running: dict[str, ModuleInputs] = field(default_factory=dict)
    num_runs: Counter[str] = field(default_factory=Counter)
    current: dict[str, AttentionModule] = field(default_factory=dict)  # of an owner of several, whose projection ran
    num_calls: Counter[str] = field(default_factory=Counter)  # of modules that no site names
    modes: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def of(cls, module: nn.Module, args: tuple, kwargs: Mapping[str, object]) -> "WatchedPass":
        """A pass that begins. Its mode is told now, since recomputation of activations may switch gradients off."""
        given = arguments(module, args, kwargs)
        mode: Mode = "evaluation" if not module.training else "training" if torch.is_grad_enabled() else "no_grad"
        return cls(given, has_cached_keys(given), mode)


def has_cached_keys(run: Mapping[str, object]) -> bool:
    """Tell whether keys of earlier calls take part, whose inputs are gone; asked before the model's call."""
    cache: Any = next((run[name] for name in CACHES if run.get(name) is not None), None)
    return int(cache.get_seq_length()) > 0 if hasattr(cache, "get_seq_length") else cache is not None


def read_padding(
    call: ModuleInputs, run: Mapping[str, object], block: Block, heads: tuple[int, ...], *, is_causal: bool
) -> tuple[Mask, Positions | None]:
    """Everything but causality and window, which the heads know. `run` are the arguments of the model's own call.

    What the attention module itself was given is what its kernel obeys; the model's padding says besides which
    queries are only padding.
    """
    assert call.x_query is not None and call.x_key is not None
    batch, num_queries, num_keys = len(call.x_query), call.x_query.shape[1], call.x_key.shape[1]
    names = CROSS_NAMES if block == "cross" else SELF_NAMES
    given = next((call.given[name] for name in names if name in call.given), None)
    dense, key_valid = _dense(given, num_queries, num_keys)
    dense = ~dense if dense is not None and is_causal and _says_what_is_forbidden(dense) else dense
    dense = dense if dense is None or dense.shape[1] == 1 else dense[:, list(heads)]
    query_padding, key_padding = padding(run, block)
    query_valid = fitting(query_padding, batch, num_queries)
    padded = fitting(key_padding, batch, num_keys)
    key_valid = _both(_both(key_valid, padded), call.key_valid)
    positions = _positions(call, run, block)
    # Packed documents: a mask parts them itself, and positions only say where each begins; flash kernels part them by
    # positions; without either they are not split.
    has_mask = dense is not None or hasattr(given, "mask_mod")
    segments = _documents(positions) if query_padding is None and key_valid is None else None
    mask = Mask(query_valid=query_valid, key_valid=key_valid, dense=dense, rule=_rule(given, call.x_query, heads))
    if segments is not None and has_mask:
        mask = replace(mask, first=first_of_segment(segments, segments, torch.ones_like(segments, dtype=torch.bool)))
    elif segments is not None and call.is_flash:
        mask = replace(mask, query_segments=segments, key_segments=segments)
    return mask, None if positions is None else (positions, positions)


def _rule(given: object, x_query: Tensor, heads: tuple[int, ...]) -> Rule | None:
    """A FlexAttention block mask's own rule."""
    if not hasattr(given, "mask_mod"):
        return None
    texts, queries = (torch.arange(number, device=x_query.device) for number in x_query.shape[:2])
    chosen = torch.tensor(heads, device=x_query.device)
    return Rule(given.mask_mod, texts, chosen, queries)  # pyright: ignore[reportAttributeAccessIssue]


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one & other


def _dense(given: object, num_queries: int, num_keys: int) -> tuple[Tensor | None, Tensor | None]:
    """A mask per pair of tokens, or one per key, in whatever form the kernel takes it."""
    if not isinstance(given, Tensor):
        return None, None
    admitted = admits(plain_mask(given))[..., :num_keys].to(given.device)
    if admitted.dim() == 2:
        return None, (admitted if admitted.shape[-1] == num_keys else None)
    admitted = admitted[:, None] if admitted.dim() == 3 else admitted
    if admitted.shape[-2] == 1 and admitted.shape[1] == 1 and num_queries > 1:
        return None, admitted[:, 0, 0]
    return (admitted if admitted.shape[-2:] == (num_queries, num_keys) else None), None


def _says_what_is_forbidden(dense: Tensor) -> bool:
    """MPT's masks: every first token may not see the last, and not every token may see itself."""
    return bool(dense[..., 0, -1].all() & ~dense.diagonal(dim1=-2, dim2=-1).all()) and dense.shape[-1] > 1


def padding(run: Mapping[str, object], block: Block) -> tuple[object, object]:
    """The model's masks of the queries' and of the keys' tokens."""
    two_sided = any(name.startswith("decoder_") for name in run)
    own, encoder = run.get("attention_mask"), run.get("encoder_attention_mask")
    if block == "vision":
        return None, None
    if block == "encoder":
        return own, own
    if block == "decoder":
        decoder = run.get("decoder_attention_mask") if two_sided else own
        return decoder, decoder
    return (run.get("decoder_attention_mask"), own) if two_sided else (own, encoder)


def fitting(padding: object, batch: int, num_tokens: int) -> Tensor | None:
    if not isinstance(padding, Tensor) or tuple(padding.shape) != (batch, num_tokens):
        return None
    return padding.bool()


def _positions(call: ModuleInputs, run: Mapping[str, object], block: Block) -> Tensor | None:
    """Position ids that were given; the models count from 0 where none are."""
    given = call.given.get("position_ids", run.get("position_ids"))
    if block == "cross" or not isinstance(given, Tensor):
        return None
    given = given[0] if given.dim() == 3 else given  # one row each for time, height and width: alike for text
    assert call.x_query is not None
    return given if given.dim() == 2 and given.shape[1] == call.x_query.shape[1] else None


def is_packed(run: Mapping[str, object]) -> bool:
    """Tell whether positions begin anew within a text, so that they are not those of its tokens."""
    given = run.get("position_ids")
    given = given[0] if isinstance(given, Tensor) and given.dim() == 3 else given
    return isinstance(given, Tensor) and given.dim() == 2 and _documents(given) is not None


def _documents(positions: Tensor | None) -> Tensor | None:
    """Packed texts: a new one begins wherever positions do not go on."""
    if positions is None:
        return None
    starts = torch.nn.functional.pad(positions.diff(dim=-1) != 1, (1, 0))
    return starts.cumsum(-1) if bool(starts.any()) else None
