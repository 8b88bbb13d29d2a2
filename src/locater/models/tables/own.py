"""The models that `locater train` makes."""

from dataclasses import replace

from ..schema import Attention, Config, Family, NormAt, RotaryAt, both_biased, entry

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
    rotary=RotaryAt(base="rotary_base", only=lambda config, layer: config.get("positions") == "rotary"),
    lookahead=0,
    **both_biased(BIAS),
)

FAMILIES = (Family("locater", ("locater",), (OWN,)),)
