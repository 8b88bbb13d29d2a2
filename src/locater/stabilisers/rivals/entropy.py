"""Entropy regularisation of attention (Attanasio et al. 2022, EAR, arXiv 2203.09192)."""

from jaxtyping import Float
from torch import Tensor

from .attention_losses import AttentionLoss


class EntropyBonus(AttentionLoss):
    """−weight · mean entropy: the loss falls as attention spreads. The entropy is log Σe^ω − Σ p ω, in nats."""

    def number(self, logits: Float[Tensor, "*batch heads queries keys"]) -> Float[Tensor, "*batch heads queries"]:
        finite = logits.nan_to_num(neginf=0.0)  # p is 0 there; 0·∞ would poison the gradient
        return (logits.softmax(-1).nan_to_num(0.0) * finite).sum(-1) - logits.logsumexp(-1).nan_to_num(neginf=0.0)
