"""The models that `locater train` makes."""

from collections.abc import Callable
from dataclasses import replace

from ..config import Config, entry
from ..schema import Attention, Family, NormAt, RotaryAt, both_biased

BIAS = entry("bias", None)


def input_norm(config: Config, layer: int) -> NormAt:
    """A layer's own first norm, or in a post-LN model the last of the layer before; the walk's model has none."""
    kind = "rms" if config.get("norm") == "rms" else "layer"
    norm = NormAt(
        kind, "layers.{layer}.attention_norm", epsilon=entry("epsilon", 1e-5), biased=None if kind == "rms" else BIAS
    )
    if config.get("norm_first", False):
        return norm
    return replace(norm, name="layers.{previous}.feedforward_norm", first=None)


def qk_norm(side: str) -> Callable[[Config, int], NormAt | None]:
    """Build the norm of a model trained with `stabiliser=qk-norm`; not with rotary positions, which it stands after."""
    norm = NormAt("rms", f"layers.{{layer}}.attention.qk_norm.{side}", epsilon=1e-6)

    def chosen(config: Config, layer: int) -> NormAt | None:
        is_before = config.get("positions") != "rotary"
        return norm if is_before and config.get("stabiliser", "") == "qk-norm" else None

    return chosen


def softcap(config: Config, layer: int) -> float | None:
    """Return the cap of a model trained with `stabiliser=soft-cap`."""
    name, _, value = config.get("stabiliser_options", "").partition("=")
    return float(value) if name == "cap" else None


OWN = Attention(
    block="decoder",
    query="layers.{layer}.attention.query",
    key="layers.{layer}.attention.key",
    layers="num_layers",
    heads="num_heads",
    key_heads=lambda config, layer: config.get("num_key_heads") or config["num_heads"],
    d_model="d_model",
    prefixes=("", "model."),
    input_norm=input_norm,
    query_norm=qk_norm("query"),
    key_norm=qk_norm("key"),
    softcap=softcap,
    rotary=RotaryAt(base="rotary_base", only=lambda config, layer: config.get("positions") == "rotary"),
    lookahead=0,
    **both_biased(BIAS),
)

FAMILIES = (Family("locater", ("locater",), (OWN,)),)
