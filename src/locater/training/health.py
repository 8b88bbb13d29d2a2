"""Why a run diverged: which layer's logits exploded first, or which module gave the first number that is none."""

import math

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from .. import modules
from ..attention import queries_and_keys
from ..errors import Refusal
from .observe import inputs_of

# e^±88 is where float32 overflows: beyond, a softmax holds nothing but its largest logit.
EXPLODED = 88.0


@torch.no_grad()
def diagnose(model: nn.Module, batch: Shaped[Tensor, "samples ..."]) -> str:
    """A sentence about the state of a model on the batch that broke it; costs a forward pass and its logits."""
    if name := next((name for name, weight in model.named_parameters() if not _is_finite(weight)), None):
        return f"the weights `{name}` are not finite"
    sites = modules.sites(model)
    outputs: dict[str, bool] = {}
    hooks = [
        module.register_forward_hook(lambda _, args, output, name=name: outputs.setdefault(name, _is_finite(output)))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with inputs_of(model, [site.query_name for site in sites]) as seen:
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    for site, x in zip(sites, seen, strict=True):
        if sentence := _exploded(site, x):
            return sentence
    broken = next((name for name, good in outputs.items() if not good), None)
    return f"the first output that is not finite is that of `{broken}`" if broken else "its gradient is not finite"


def _exploded(site: modules.Site, x: Tensor) -> str | None:
    """The layer's worst head, if its logits are beyond what a softmax can hold."""
    try:
        heads = site.build().heads
    except Refusal as reason:
        return str(reason)
    queries, keys = queries_and_keys(heads, x, x)
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    largest = (queries @ keys.mT * heads[0].scale).abs().nan_to_num(math.inf).amax((0, 2, 3))
    worst = int(largest.argmax())
    if largest[worst] <= EXPLODED:
        return None
    size = f"{largest[worst]:.3g}" if math.isfinite(largest[worst]) else "infinity"
    return f"the logits of layer {site.number}, head {worst} exploded (largest: {size})"


def _is_finite(value: object) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())
