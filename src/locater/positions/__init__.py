"""How a position enters a logit: rotations of the query and key, or a bias added to their product."""

from .bias import Alibi, Buckets, PositionBias
from .rotary import Rotary
from .scaling import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Scaling, YaRN

__all__ = [
    "Alibi", "Buckets", "DynamicNTK", "Linear", "Llama3", "LongRoPE", "PositionBias", "Proportional", "Rotary",
    "Scaling", "YaRN",
]  # fmt: skip
