"""Diagnose a diverged run: which layer's logits exploded first, or which module first gave NaN or infinity."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from locater.attention import queries_and_keys
from locater.attention.capture import inputs_of
from locater.errors import Refusal
from locater.models import live

# e^±88 is where float32 overflows: beyond, a softmax holds nothing but its largest logit.
EXPLODED = 88.0


@torch.no_grad()
def diagnose(model: nn.Module, batch: Shaped[Tensor, "samples ..."]) -> str | None:
    """Describe a model's fault on a batch, if it has one; costs a forward pass and its logits."""
    if name := next((name for name, weight in model.named_parameters() if not _is_finite(weight)), None):
        return f"the weights `{name}` are not finite"
    sites = live.sites(model)
    broken: list[str] = []

    def noting(name: str) -> Callable[[nn.Module, object, object], None]:
        def note(module: nn.Module, args: object, output: object) -> None:
            if not _is_finite(output):
                broken.append(name)

        return note

    hooks = [module.register_forward_hook(noting(name)) for name, module in model.named_modules() if name]
    try:
        with inputs_of(dict(model.named_modules()), [site.query_name for site in sites]) as seen:
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    for site, x in zip(sites, seen, strict=True):
        if sentence := _exploded(site, x):
            return sentence
    return f"the first output that is not finite is that of `{broken[0]}`" if broken else None


def _exploded(site: live.Site, x: Tensor) -> str | None:
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
