"""Names for the shape of a profile ρ_1 … ρ_T, and one number for how local it is."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..quantities import REGIMES

# Below this maximum of ρ hardly any token has a gradient.
NO_SIGNAL = 0.05
# A profile whose minimum is at least this share of its maximum is flat.
FLAT = 0.8
# An end of the context is low below this share of the maximum. A head whose eigenvalues average to zero keeps its ends
# above √(1/7) = 0.38 of the maximum, at any scale, so such a head is never called localized; and at a small variance
# ρ(1) falls through 1/3 just beyond tr A = 2λ, the border between late and middle.
LOW = 1 / 3
# Each end is this share of the context, and at least one token.
END = 0.05


def classify(profile: Float[Tensor, " length"]) -> str:
    """The regime of one profile, a word of REGIMES.

    >>> classify(torch.linspace(0, 1, 100))
    'late'
    """
    return REGIMES[int(codes(profile))]


def classify_all(profiles: Float[Tensor, "*batch length"]) -> list[str]:
    """The regimes of many profiles, in the order of the flattened batch."""
    return [REGIMES[code] for code in codes(profiles).flatten().tolist()]


def codes(profiles: Float[Tensor, "*batch length"]) -> Int[Tensor, "*batch"]:
    """Indices into REGIMES: no-signal, then uniform, then by which ends are low against the maximum.

    Both ends low is middle; both high yet not flat, a dip, is mixed.
    """
    highest, lowest = profiles.amax(-1), profiles.amin(-1)
    size = max(1, round(END * profiles.shape[-1]))
    starts_high = profiles[..., :size].mean(-1) >= LOW * highest
    ends_high = profiles[..., -size:].mean(-1) >= LOW * highest
    regime = torch.full_like(highest, REGIMES.index("mixed"), dtype=torch.long)
    regime[~starts_high & ~ends_high] = REGIMES.index("middle")
    regime[starts_high & ~ends_high] = REGIMES.index("early")
    regime[~starts_high & ends_high] = REGIMES.index("late")
    regime[lowest >= FLAT * highest] = REGIMES.index("uniform")
    regime[highest < NO_SIGNAL] = REGIMES.index("no-signal")
    return regime


def localisation(profiles: Float[Tensor, "*batch length"]) -> Float[Tensor, "*batch"]:
    """L = 1 − (N − 1)/(T − 1) with N = exp(entropy of ρ/Σρ): the share of the context that is left out.

    N counts the tokens that carry the signal: k tokens of equal ρ give N = k. So L is 0 for a uniform profile, 1 for
    a single token, and for a window of a given share of a long context it is the rest, whatever T is; the normalised
    entropy log N / log T would call the same window less and less local as T grows. It sees the shape alone: a ρ of
    zero everywhere, and T = 1, select nothing and give 0.
    """
    total = profiles.sum(-1, keepdim=True)
    share = profiles / total.where(total > 0, 1)
    effective = torch.special.entr(share).sum(-1).exp()
    local = 1 - (effective - 1) / max(1, profiles.shape[-1] - 1)
    selects = (total[..., 0] > 0) & (profiles.shape[-1] > 1)
    return torch.where(selects, local, 0.0).clamp(0, 1)
