"""`Head`: one query head with its key head, everything that turns two layer inputs into a logit.

Files and live models both yield heads; all analysis takes heads and never asks where they came from.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .errors import Refusal, refusal, within
from .positions import PositionBias, Rotary
from .projections import Projection, size, widen

Block = Literal["encoder", "decoder", "cross", "vision"]
BLOCKS: tuple[Block, ...] = ("encoder", "decoder", "cross", "vision")
Positions = tuple[Int[Tensor, " queries"], Int[Tensor, " keys"]]


@dataclass(frozen=True, eq=False)
class Head:
    """Logit of a key for a query: softcap(scale · q(x_query)·k(x_key)) + position bias.

    x is the attention module's input, after its norm; `folded()` is the same head on the input before gain and bias.
    `lookback` and `lookahead` bound the admissible distance: causal is `lookahead=0`, a window of w is `lookback=w−1`.
    `sink` is the learned logit of a key that is no token (gpt-oss): it takes attention, and nothing comes of it.
    `turns_first`: queries and keys turn before their own norms, not after (HunYuan); then gains that differ within a
    turning pair make logits depend on where the text begins, and `anywhere()` is the mean over that.
    """

    layer: int
    index: int
    query: Projection
    key: Projection
    scale: float
    key_index: int | None = None
    block: Block = "decoder"
    rotary: Rotary | None = None
    position_bias: PositionBias | None = None
    softcap: float | None = None
    lookback: int | None = None
    lookahead: int | None = None
    sink: Float[Tensor, ""] | None = None
    turns_first: bool = False

    def __post_init__(self):
        try:
            _check(self)
        except Refusal:
            with within(self.label):
                raise

    def __repr__(self) -> str:
        return f"Head({self.label}, {self.d_head} of {self.d_model}, λ = {self.temperature:.4g})"

    @property
    def label(self) -> str:
        return label(self.block, self.layer, self.index)

    @property
    def d_head(self) -> int:
        return self.query.weight.shape[0]

    @property
    def d_model(self) -> int:
        return self.query.weight.shape[1]

    @property
    def temperature(self) -> float:
        """λ, the number that logits are divided by."""
        return 1 / self.scale

    def folded(self) -> "Head":
        """The same head as a function of the normalised input: the input norms' gains and biases folded in."""
        return replace(self, query=self.query.folded(), key=self.key.folded())

    def anywhere(self) -> "Head":
        """The head whose logits are the mean of this one's over all places where a text may begin.

        With gains d = g_Q g_K behind the rotation a pair (i, j) gives R_m^T diag(d_i, d_j) R_n, which is
        (d_i + d_j)/2 R_{n−m} and a part that turns with m + n, of mean 0. So each pair's gains are replaced by their
        mean, which any rotation leaves alone, and norms stand before the rotation as elsewhere.
        """
        if not self.turns_first or self.rotary is None:
            return self
        query, key = self.query.norm, self.key.norm
        assert query is not None and key is not None  # see `_check`
        gains = [widen(norm.gain) for norm in (query, key) if norm.gain is not None]
        if gains:
            query = replace(query, gain=_mean_over_pairs(torch.stack(gains).prod(0), self.rotary))
        sides = replace(self.query, norm=query), replace(self.key, norm=replace(key, gain=None))
        return replace(self, query=sides[0], key=sides[1], turns_first=False)

    def logits(
        self,
        x_query: Float[Tensor, "*batch queries d_model"],
        x_key: Float[Tensor, "*batch keys d_model"],
        positions: Positions | None = None,
    ) -> Float[Tensor, "*batch queries keys"]:
        """The full logit of every key for every query, unmasked; positions count from 0 unless given."""
        query_positions, key_positions = positions or _count(x_query, x_key)
        length = 1 + int(max(query_positions.max(), key_positions.max()))
        queries = self._placed(self.query, x_query, query_positions, length)
        keys = self._placed(self.key, x_key, key_positions, length)
        logits = queries @ keys.mT * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.position_bias is not None:
            logits = logits + self.position_bias(_distance(query_positions, key_positions)).to(logits)
        return logits

    def _placed(self, side: Projection, x: Tensor, positions: Tensor, length: int) -> Tensor:
        """A query or key as it is multiplied: normed and turned, in this head's order."""
        if self.rotary is None:
            return side(x)
        if not self.turns_first:
            return self.rotary.rotate(side(x), positions, length=length)
        turned = self.rotary.rotate(side.rows(x), positions, length=length)
        return turned if side.norm is None else side.norm(turned)

    def admits(
        self, query_positions: Int[Tensor, " queries"], key_positions: Int[Tensor, " keys"]
    ) -> Bool[Tensor, "queries keys"]:
        """Compute which keys a query may see: causality and window, not padding."""
        return admitted(_distance(query_positions, key_positions), lookback=self.lookback, lookahead=self.lookahead)

    def attention(
        self,
        x_query: Float[Tensor, "*batch queries d_model"],
        x_key: Float[Tensor, "*batch keys d_model"],
        positions: Positions | None = None,
    ) -> Float[Tensor, "*batch queries keys"]:
        """The softmax of the admitted logits, materialised: for small inputs and as the reference of fast paths.

        With a sink each query's weights sum to less than 1: the rest is the sink's.
        """
        positions = positions or _count(x_query, x_key)
        logits = self.logits(x_query, x_key, positions).masked_fill(~self.admits(*positions), -math.inf)
        if self.sink is None:
            return logits.softmax(-1)
        sink = self.sink.to(logits).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


def label(block: str, layer: int, index: int) -> str:
    """Name of a head in messages.

    >>> label("decoder", 3, 0)
    'decoder layer 3, head 0'
    """
    return f"{block} layer {layer}, head {index}"


def _count(x_query: Float[Tensor, "*batch queries d"], x_key: Float[Tensor, "*batch keys d"]) -> Positions:
    """Positions 0, 1, 2, … for both."""
    return (
        torch.arange(x_query.shape[-2], device=x_query.device),
        torch.arange(x_key.shape[-2], device=x_key.device),
    )


def _mean_over_pairs(gain: Tensor, rotary: Rotary) -> Tensor:
    """Replace the two gains of each pair that turns by their mean; at frequency 0 a pair stands still."""
    pairs = rotary.pairs[rotary.frequencies(1) != 0].to(gain.device)
    return gain.index_put((pairs,), gain[pairs].mean(-1, keepdim=True).expand(pairs.shape))


def admitted(distance: Int[Tensor, "*pairs"], *, lookback: int | None, lookahead: int | None) -> Bool[Tensor, "*pairs"]:
    """At which distances of a query from a key it may see it, within the bounds that `Head` has."""
    seen = torch.ones_like(distance, dtype=torch.bool)
    if lookback is not None:
        seen &= distance <= lookback
    if lookahead is not None:
        seen &= -distance <= lookahead
    return seen


def _distance(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    return query_positions[:, None] - key_positions[None, :]


def _check(head: Head) -> None:
    """Refuse, in a sentence, what cannot be a head."""
    query, key = head.query.weight, head.key.weight
    if query.shape != key.shape:
        raise refusal("query and key weights of one shape (d_head, d_model)", f"{size(query)} and {size(key)}")
    if not (math.isfinite(head.scale) and head.scale > 0):
        raise refusal("a positive, finite logit scale", head.scale)
    if head.block not in BLOCKS:
        raise refusal("a block among " + ", ".join(BLOCKS), repr(head.block))
    if head.rotary is not None and head.rotary.start + head.rotary.num_dims > query.shape[0]:
        raise refusal(f"rotary pairs within {query.shape[0]} dimensions", head.rotary)
    if head.turns_first and head.rotary is not None:
        _check_turns_first(head)
    if head.softcap is not None and not head.softcap > 0:
        raise refusal("a positive soft-cap", head.softcap)
    if head.sink is not None and (head.sink.numel() != 1 or not bool(torch.isfinite(head.sink.detach()).all())):
        raise refusal("one finite logit for the sink", f"{size(head.sink)} or NaN")
    query_known, key_known = head.query.known_finite, head.key.known_finite
    if not ((query_known or head.query.is_finite) and (key_known or head.key.is_finite)):
        raise refusal("finite weights", "NaN or infinity", "the checkpoint is damaged or the run has diverged")


def _check_turns_first(head: Head) -> None:
    """Norms behind a rotation must be of a kind that it does not change, but for their gains."""
    for side in (head.query, head.key):
        norm = side.norm
        if norm is None or norm.kind == "layer" or norm.bias is not None or side.whole is not None:
            expected = "RMS or L2 norms of each head's queries and keys, without biases, after the rotation"
            raise refusal(expected, "no norm" if norm is None else f"{norm.kind}, over all heads or with a bias")
    if (amplitude := head.rotary.amplitude if head.rotary else 1.0) != 1:
        raise refusal("rotary positions of amplitude 1 before a norm", amplitude)
