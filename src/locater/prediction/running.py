"""One pass of a model: its self-attention layers, their inputs as they come, and the loss of the next token."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..attention.calls import AttentionCall
from ..attention.capture import Take, inputs_of
from ..attention.interception import Interception
from ..errors import Refusal, missing, refusal
from ..models import AttentionModule, live
from ..models.live.modules import Explicit
from ..models.live.tensors import named_modules
from ..records import Json

TAKEN = "heads that were named are taken without positions, norms or a window between projection and product"


def read_named(
    model: nn.Module, heads: Sequence[Explicit], causal: bool | None, run: Callable[[Sequence[AttentionModule]], object]
) -> list[AttentionModule]:
    """Read the layers that `heads` names, as `causal` says; refuse if `run`, a pass over them, calls a kernel."""
    if causal is None:
        raise refusal("causal=True or causal=False with heads=…", "neither", "projections do not show the mask")
    layers = [
        replace(layer, heads=tuple(replace(head, lookahead=0 if causal else None) for head in layer.heads))
        for layer in live.open_live(model, heads=heads).layers()
    ]
    calls: list[AttentionCall] = []
    with Interception(calls.append):
        run(layers)
    if calls:
        remedy = "leave heads=… out: the call shows positions, norms and mask, which projections do not"
        raise refusal("attention that calls no kernel, for heads=…", f"a call of {calls[0].through}", remedy)
    return layers


def self_attention(
    model: nn.Module,
    ids: Int[Tensor, "batch tokens"] | None = None,
    *,
    heads: Sequence[Explicit] = (),
    causal: bool | None = None,
) -> tuple[list[AttentionModule], list[str]]:
    """The layers whose queries and keys come from one input, and why others are left out.

    A model that no table knows shows its heads on `ids`; `causal` says what those see that `heads` names.
    """
    found, left_out = [], []

    def once(layers: Sequence[AttentionModule]) -> object:
        return None if ids is None else run_model(model, layers, ids, lambda number, x: None)

    for layer in read_named(model, heads, causal, once) if heads else _layers(model, ids):
        left_out += layer.refused
        if layer.block in ("cross", "vision"):
            left_out.append(f"{layer.block} layer {layer.number}: its queries and keys are not tokens of one text")
        elif layer.heads:
            found.append(layer)
    if not found:
        raise Refusal(left_out[0]) if left_out else missing("self-attention layers")
    return found, [*left_out, *([TAKEN] if heads else [])]


def _layers(model: nn.Module, ids: Tensor | None) -> Iterator[AttentionModule]:
    """Find the attention modules: by the family that the config names, else in one pass over `ids`."""
    device = next((parameter.device for parameter in model.parameters()), None)
    sample = None if ids is None else ids.to(device)
    if live.settings(model).get("model_type") is None:
        return live.open_live(model, sample=sample).layers()
    try:
        return live.open_live(model).layers()
    except Refusal:
        if sample is None:
            raise
        return live.open_live(model, sample=sample).layers()


@torch.no_grad()
def run_model(model: nn.Module, layers: Sequence[AttentionModule], ids: Int[Tensor, "batch tokens"], take: Take) -> Any:
    """One forward pass; `take(number, x)` gets the input of each layer's attention, as it comes."""
    modules = named_modules(model)
    names = [_input_module(layer.query_name, modules) for layer in layers]

    def in_batches(number: int, x: Tensor) -> None:
        batch_first = getattr(modules[names[number]], "batch_first", True)
        take(number, x if batch_first else x.transpose(0, 1))

    with inputs_of(modules, names, in_batches):
        ids = ids.to(next(model.parameters()).device)
        has_type = hasattr(getattr(model, "config", None), "model_type")
        return model(**_arguments(model, ids)) if has_type and hasattr(model, "get_input_embeddings") else model(ids)


def _input_module(query_name: str, modules: Mapping[str, nn.Module]) -> str:
    """Name the module whose input the queries are made of: `nn.MultiheadAttention` has none for them alone."""
    owner, _, _ = query_name.rpartition(".")
    packed = query_name not in modules and isinstance(modules.get(owner), nn.MultiheadAttention)
    return owner if packed else query_name


def _arguments(model: nn.Module, ids: Tensor) -> Json:
    """Build the model's arguments for a text; a model with two sides reads it on both."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
    return {"input_ids": ids} if getattr(config, "use_cache", None) is None else {"input_ids": ids, "use_cache": False}


def next_token_losses(output: object, ids: Int[Tensor, "batch tokens"], model: nn.Module) -> list[float]:
    """The mean cross entropy of the next token of each window; none where the model does not predict it."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    rows = 0 if logits is None else logits.shape[-1]
    if logits is None or logits.shape[:2] != ids.shape or rows <= int(ids.max()) or not _predicts_next_token(model):
        return []
    ids = ids.to(logits.device)
    return [float(cross_entropy(one[:-1].float(), own[1:])) for one, own in zip(logits, ids, strict=True)]


def _predicts_next_token(model: nn.Module) -> bool:
    return getattr(model, "predicts_next_token", False) or type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
