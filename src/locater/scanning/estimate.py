"""Estimate a head's behaviour from its weights alone: the profile over distance that its positions make.

The random walk is the theory's model of tokens and does not describe trained models; what carries locality there is
position, in fast rotary pairs, in biases, in position tables. `docs/evidence.md` has how well each estimate holds.
"""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from ..head import admitted
from ..positions import Rotary
from ..quantities import FIRST_QUERY, NEAR
from ..spectra import Grams
from .batch import HeadBatch
from .direct import QUERIES, SEEN, Direct, DirectInputs, direct_logits
from .products import SideBiases

# Texts that the estimate is of, as `predict` measures them: queries FIRST_QUERY … LENGTH − 1.
LENGTH = 256
# How far the logits of typical tokens swing over all rotary pairs together, from the middle of the model on. What
# tokens have in common grows with depth (embeddings have little of it), so the first layer has half of it. Fitted to
# the mean absolute error on trained decoders.
SWING, FIRST_SWING = 14.0, 0.5
# Fewer pairs that turn within LENGTH make waves, not a decay: in a decoder with two the estimate ran against attention.
FEWEST_TURNING = 4
# The estimate is of trained models. In every layer of those measured the median head's pairs differ in strength by 0.15
# of it or more, where fresh weights differ by chance, 1/√(2 d_model); and logits of tokens that have nothing in common
# would swing by 3.5 or more (from the second layer on), where in a small decoder after 500 steps it is 0.3 to 0.6.
LEAST_VARIED, BY_CHANCE, LEAST_LOGITS = 0.1, 2.0, 3.0
# Four in five heads lie within so much of the estimate: the widest of the models measured, and for rotary positions a
# third more, for models that are not among them.
ROTARY_MARGIN, DIRECT_MARGIN = 0.28, 0.25


def direct_into(batch: HeadBatch, direct: Direct) -> DirectInputs | None:
    """Compute the direct path's inputs of these heads; None where it says nothing about them.

    Rotary heads have their positions in themselves; what cross-attention and pictures look at is no text.
    """
    first = batch.first
    if first.block in ("cross", "vision") or first.rotary is not None:
        return None
    inputs = direct(first.block, first.position_bias is None)
    return inputs if inputs is not None and inputs.x.shape[1] == first.d_model else None


Interval = tuple[float, float]


def estimate_near_mass(
    batch: HeadBatch,
    acting: Grams,
    biases: SideBiases,
    inputs: DirectInputs | None,
    queries: Float[Tensor, "groups heads d_head queries"] | None = None,
    *,
    num_layers: int,
) -> tuple[list[float | None], list[Interval | None]]:
    """Estimate each head's mass on keys nearer than 16 beyond the first token, in texts of 256 tokens; and intervals.

    `acting` are the Gram products with all gains and norms in them, `biases` those of heads without norms; `inputs`
    and `queries` are of the direct path, where there is one; `num_layers` are those of the model, for its depth. None
    for rotary heads that are two-sided, untrained or of few pairs, cross-attention and heads without any positions. No
    interval where no trained model with such positions was measured: then no words are made of it either.
    """
    first = batch.first
    near, margin = [math.nan] * len(batch), None
    if inputs is not None:
        margin = DIRECT_MARGIN if first.position_bias is None else None
        near = _direct(batch, inputs, queries)
    elif first.block not in ("cross", "vision") and first.lookahead == 0 and first.rotary is not None:
        margin, near = ROTARY_MARGIN, _rotary(batch, first.rotary, acting, biases, num_layers)
    known = [mass if math.isfinite(mass) else None for mass in near]
    return known, [
        None if mass is None or margin is None else (max(0.0, mass - margin), min(1.0, mass + margin)) for mass in known
    ]


@lru_cache(maxsize=8)
def _num_turning(rotary: Rotary) -> int:
    """The pairs that turn at least once in a text."""
    return int((rotary.frequencies(LENGTH) > 2 * torch.pi / LENGTH).sum())


def swing(layer: int, num_layers: int) -> float:
    """The swing of a layer's logits: FIRST_SWING of it at the first, all of it from the middle on.

    >>> [swing(layer, 4) for layer in range(4)]
    [7.0, 10.5, 14.0, 14.0]
    """
    return SWING * min(1.0, FIRST_SWING + 2 * (1 - FIRST_SWING) * layer / max(1, num_layers))


def _rotary(batch: HeadBatch, rotary: Rotary, acting: Grams, biases: SideBiases, num_layers: int) -> list[float]:
    """softmax over Δ of `swing` · Σ_j w_j cos θ_jΔ + b_QᵀR_Δ b_K/λ, w_j the share of query-key strength in pair j.

    Strength is ‖q rows‖‖k rows‖. Fast pairs tell near from far, slow ones tell nothing: typical tokens have a part in
    common whose logit falls off with distance as fast as the pairs turn. O(pairs · LENGTH) per head. NaN where the
    estimate does not hold.
    """
    strength, still = _strengths(acting, rotary)
    total = (strength.sum(-1) + still).clamp(min=torch.finfo(strength.dtype).tiny)
    if _num_turning(rotary) < FEWEST_TURNING or not _is_trained(batch, strength, total):
        return [math.nan] * len(batch)
    cosines, sines = _turns(rotary)
    share = strength / total[:, None]
    logits = swing(batch.first.layer, num_layers) * share @ cosines
    if biases.query is not None and biases.key is not None:
        even, odd = _bias_terms(biases.query.double(), biases.key.double(), rotary, batch.first.scale)
        logits = logits + even @ cosines + odd @ sines
    window = batch.first.lookback
    if window is not None and window + 1 < LENGTH:
        logits[:, window + 1 :] = -torch.inf
    return near_by_distance(logits).tolist()


def _is_trained(batch: HeadBatch, strength: Float[Tensor, "heads pairs"], total: Float[Tensor, " heads"]) -> bool:
    """Tell whether the heads of a layer, of which these are some, are like those that the constants were fitted to."""
    tiny = torch.finfo(strength.dtype).tiny
    varied = float((strength.std(-1) / strength.mean(-1).clamp(min=tiny)).median())
    if varied < max(LEAST_VARIED, BY_CHANCE / (2 * batch.first.d_model) ** 0.5):
        return False
    logits = batch.first.scale * float(total.median())
    return logits > LEAST_LOGITS or not batch.is_linear  # a norm sets their size


def near_by_distance(logits: Float[Tensor, "heads distances"]) -> Float[Tensor, " heads"]:
    """The near mass of causal queries FIRST_QUERY … whose logits depend on the distance only, their mean."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp().cumsum(-1)
    return (weights[:, NEAR - 1, None] / weights[:, FIRST_QUERY:]).mean(-1)


def _strengths(acting: Grams, rotary: Rotary) -> tuple[Float[Tensor, "heads pairs"], Float[Tensor, " heads"]]:
    """‖q rows‖‖k rows‖ of every pair, and of the rows that do not turn, from the diagonals of the Gram products."""
    query, key = (gram.diagonal(dim1=-2, dim2=-1) for gram in (acting.query, acting.key))
    pairs = (query[..., rotary.pairs].sum(-1) * key[..., rotary.pairs].sum(-1)).sqrt().flatten(0, 1).double()
    still = (query * key).sqrt().double()
    still[..., rotary.pairs.flatten()] = 0
    return pairs, still.sum(-1).flatten()


@lru_cache(maxsize=8)
def _turns(rotary: Rotary) -> tuple[Tensor, Tensor]:
    """cos θ_jΔ and sin θ_jΔ, pairs by distances."""
    angles = rotary.frequencies(LENGTH).double()[:, None] * torch.arange(LENGTH, dtype=torch.float64)
    return angles.cos(), angles.sin()


def _bias_terms(query: Tensor, key: Tensor, rotary: Rotary, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the biases' own part in each pair: cosine and sine parts of b_QᵀR_Δ b_K/λ, (heads, pairs) each."""
    first, second = rotary.pairs.unbind(-1)
    size = scale * rotary.amplitude**2
    even = query[..., first] * key[..., first] + query[..., second] * key[..., second]
    odd = query[..., first] * key[..., second] - query[..., second] * key[..., first]
    return (even * size).flatten(0, 1), (odd * size).flatten(0, 1)


def _direct(batch: HeadBatch, inputs: DirectInputs, queries: Tensor | None) -> list[float]:
    """The near mass of each head when embeddings and positions come straight into its layer, through its norm."""
    first = batch.first
    hidden, near = _masks(first.lookback, first.lookahead)
    p = direct_logits(batch, inputs, queries).add_(hidden).softmax(-2)
    return _extended(p.mul_(near).sum(-2), both=first.lookahead != 0).tolist()


@lru_cache(maxsize=8)
def _masks(lookback: int | None, lookahead: int | None) -> tuple[Tensor, Tensor]:
    """Build the mask of uncounted keys and the mask of near keys: one for all heads of a kind.

    The first token is not counted: what it gets beyond others is a sink.
    """
    distance = QUERIES - torch.arange(SEEN)[:, None]
    counted = admitted(distance, lookback=lookback, lookahead=lookahead)
    counted[0] = False
    hidden = torch.zeros(counted.shape).masked_fill_(~counted, -torch.inf)
    return hidden, (distance.abs() < NEAR).float()


def _extended(near: Float[Tensor, "heads queries"], *, both: bool) -> Float[Tensor, " heads"]:
    """From SEEN tokens to LENGTH: farther keys weigh as the far ones that were seen."""
    seen, whole = (_mean_far(length, both=both) for length in (SEEN, LENGTH))
    farther = whole / seen
    return (near / (near * (1 - farther) + farther)).mean(-1)


def in_texts_of(length: int, near: float, *, both: bool) -> float:
    """The near mass in texts of another length than LENGTH: farther keys weigh as those that there are, as above.

    >>> round(in_texts_of(128, 0.5, both=False), 3), in_texts_of(LENGTH, 0.25, both=True)
    (0.643, 0.25)
    """
    far = (1 - near) * _mean_far(length, both=both) / _mean_far(LENGTH, both=both)
    return near / (near + far)


def _mean_far(length: int, *, both: bool) -> float:
    return length - 2 * NEAR if both else (FIRST_QUERY + length) / 2 - NEAR
