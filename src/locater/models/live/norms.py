"""Which norm made a live attention module's input, where the modules around it show that."""

import torch
from torch import nn

from ...errors import refusal
from .. import NormAt

Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def norm_at(name: str, module: object) -> NormAt | None:
    """The place of a norm that the tables can read; None for none, or for an identity."""
    if module is None or isinstance(module, nn.Identity):
        return None
    is_rms = isinstance(module, nn.RMSNorm) or "rmsnorm" in type(module).__name__.lower()
    if not isinstance(module, nn.LayerNorm) and not is_rms:
        raise refusal(f"a layer norm or an RMS norm at {name}", type(module).__name__)
    stored = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    epsilon = float(torch.finfo(torch.float32).eps if stored is None else stored)
    return NormAt("rms" if is_rms else "layer", name, epsilon=epsilon, plain=getattr(module, "weight", None) is None)


class Stacks:
    """torch's transformer layers and the stacks they stand in: a post-LN layer's input norm is the one before it."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules

    def is_layer(self, name: str) -> bool:
        return isinstance(self.modules.get(name), Layer)

    def norm(self, owner: str, norm: str) -> NormAt | None:
        name = f"{owner}.{norm}".lstrip(".")
        return norm_at(name, self.modules.get(name))

    def output_norm(self, layer: str) -> NormAt | None:
        """The norm that ends a post-LN layer."""
        module = self.modules[layer]
        if not isinstance(module, Layer) or module.norm_first:
            return None
        return self.norm(layer, "norm2" if isinstance(module, nn.TransformerEncoderLayer) else "norm3")

    def input_norm(self, layer: str) -> NormAt | None:
        """The layer's own first norm, or the last of the layer before; unknown outside a stack or at its start."""
        if getattr(self.modules[layer], "norm_first", False):
            return self.norm(layer, "norm1")
        stack, _, number = layer.rpartition("layers.")
        owner = self.modules.get(stack.removesuffix("."))
        if not isinstance(owner, nn.TransformerEncoder | nn.TransformerDecoder) or number == "0":
            return None
        return self.output_norm(f"{stack}layers.{int(number) - 1}")

    def cross_norm(self, layer: str) -> NormAt | None:
        return self.norm(layer, "norm2" if getattr(self.modules[layer], "norm_first", False) else "norm1")

    def memory_norm(self, layer: str) -> NormAt | None:
        """What ends the encoder that the decoder looks at: known within `nn.Transformer` only."""
        whole, _, _ = layer.rpartition("decoder.layers.")
        if not isinstance(self.modules.get(whole.removesuffix(".")), nn.Transformer):
            return None
        encoder = self.modules.get(f"{whole}encoder")
        if not isinstance(encoder, nn.TransformerEncoder):
            return None
        if encoder.norm is not None:
            return self.norm(f"{whole}encoder", "norm")
        return self.output_norm(f"{whole}encoder.layers.{len(encoder.layers) - 1}")
