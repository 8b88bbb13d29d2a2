"""Attention z-loss: the squared log-partition function of every query.

After the router's z-loss of Zoph et al. 2022 (arXiv 2202.08906) and the output's of Chowdhery et al. 2022 (PaLM).
"""

from jaxtyping import Float
from torch import Tensor

from .attention_losses import AttentionLoss


class ZLoss(AttentionLoss):
    """weight · mean (log Σ_t e^{ω_t})²: holds logits near zero, in sum, without a word on how they are spread."""

    def number(self, logits: Float[Tensor, "*batch heads queries keys"]) -> Float[Tensor, "*batch heads queries"]:
        return logits.logsumexp(-1).nan_to_num(neginf=0.0).square()
