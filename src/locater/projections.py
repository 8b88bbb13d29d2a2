"""`Projection`: how a head turns a layer input into its query or key vector, norms included.

Positions come later; a projection is what one token does alone.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from .errors import refusal


@dataclass(frozen=True, eq=False)
class Norm:
    """gain · (y − [mean y]) / √(mean square + ε) + bias; `l2` divides by the length of y instead."""

    kind: Literal["layer", "rms", "l2"]
    gain: Float[Tensor, " dims"] | None = None
    bias: Float[Tensor, " dims"] | None = None
    epsilon: float = 1e-5

    def __post_init__(self):
        if self.kind not in ("layer", "rms", "l2"):
            raise refusal("a norm of kind layer, rms or l2", repr(self.kind))

    def __call__(
        self, y: Float[Tensor, "*batch dims"], *, over: Float[Tensor, "*batch all_dims"] | None = None
    ) -> Float[Tensor, "*batch dims"]:
        """Normalise y by its own statistics, or by those of the longer vector `over` that it is a part of."""
        over = y if over is None else over
        if self.kind == "layer":
            mean = over.mean(-1, keepdim=True)
            y, over = y - mean, over - mean
        square = over.square()
        square = square.sum(-1, keepdim=True) if self.kind == "l2" else square.mean(-1, keepdim=True)
        y = y * (square + self.epsilon).rsqrt()
        if self.gain is not None:
            y = y * self.gain.to(y)
        return y if self.bias is None else y + self.bias.to(y)

    def linearised(self, weight: Tensor, *, over: Tensor | None = None) -> Tensor:
        """norm(W x) as a matrix, its divisor taken at its root mean square over white x: √(‖W‖²_F / rows)."""
        weight, over = widen(weight), widen(weight if over is None else over)
        if self.kind == "layer":
            weight, over = weight - over.mean(0), over - over.mean(0)
        square = over.square().sum() if self.kind == "l2" else over.square().sum() / len(over)
        weight = weight * (square + self.epsilon).rsqrt()
        return weight if self.gain is None else weight * self.gain.to(weight)[:, None]

    def fold(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """W (g∘x̂ + b) + c = (W diag g) x̂ + (W b + c); a layer norm's x̂ has mean 0, so W diag g is centred too.

        What the weights do to the all-ones direction is never seen behind a layer norm: (W diag g) C, C = 1 − 11^T/d.
        """
        weight = widen(weight)
        if self.bias is not None:
            shift = weight @ self.bias.to(weight)
            bias = shift if bias is None else bias.to(weight) + shift
        weight = weight if self.gain is None else weight * self.gain.to(weight)
        return (weight - weight.mean(-1, keepdim=True) if self.kind == "layer" else weight), bias


@dataclass(frozen=True, eq=False)
class Whole:
    """The projection of all heads together, for a norm whose statistics run over all of it (OLMo 2)."""

    weight: Float[Tensor, "rows d_model"]
    bias: Float[Tensor, " rows"] | None = None


@dataclass(frozen=True, eq=False)
class LowRank:
    """The first rows of a projection as up · norm(down · x), as in multi-head latent attention (DeepSeek-V2)."""

    down: Float[Tensor, "rank d_model"]
    up: Float[Tensor, "rows rank"]
    norm: Norm | None = None
    down_bias: Float[Tensor, " rank"] | None = None

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch rows"]:
        inner = _affine(x, self.down, self.down_bias)
        return _affine(self.norm(inner) if self.norm else inner, self.up, None)

    @property
    def weight(self) -> Float[Tensor, "rows d_model"]:
        """The linear map at inner norm one: what the spectrum sees."""
        up, gain = widen(self.up), self.norm.gain if self.norm else None
        return (up if gain is None else up * gain.to(up)) @ self.down.to(up)


@dataclass(frozen=True, eq=False)
class Projection:
    """x ↦ norm(W x + b). `input_norm` is the norm that made x: not applied here, but `folded()` takes it in.

    `norm` is QK-norm, over this head's rows or, with `whole`, over all heads'. With `low_rank` the first rows of
    `weight` are only its linearisation, and the call goes through the inner norm. `known_finite` says that the weight
    was looked at already, as a part of a larger one.
    """

    weight: Float[Tensor, "d_head d_model"]
    bias: Float[Tensor, " d_head"] | None = None
    input_norm: Norm | None = None
    norm: Norm | None = None
    whole: Whole | None = None
    low_rank: LowRank | None = None
    known_finite: bool = False

    def __post_init__(self):
        weight, norm, input_norm = self.weight, self.norm, self.input_norm
        if weight.dim() != 2 or not weight.is_floating_point():
            raise refusal("floating-point weights of shape (d_head, d_model)", f"{weight.dtype} of {size(weight)}")
        rows, columns = weight.shape
        if not 0 < rows <= columns:
            remedy = "weights stored as (d_model, d_head) must be transposed"
            raise refusal("0 < d_head ≤ d_model", size(weight), remedy)
        expected = (
            ("bias", self.bias, rows),
            ("gain of the input norm", None if input_norm is None else input_norm.gain, columns),
            ("gain of the norm", None if norm is None else norm.gain, rows),
        )
        for name, vector, count in expected:
            if vector is not None and vector.shape != (count,):
                raise refusal(f"a {name} of {count} numbers", size(vector))

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_head"]:
        rows = self.rows(x)
        if self.norm is None:
            return rows
        return self.norm(rows, over=_affine(x, self.whole.weight, self.whole.bias) if self.whole else None)

    def rows(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_head"]:
        """W x + b, before QK-norm."""
        if self.low_rank is None:
            return _affine(x, self.weight, self.bias)
        direct = _affine(x, self.weight[self.low_rank.up.shape[0] :], None)
        rows = torch.cat([self.low_rank(x), direct], -1)
        return rows if self.bias is None else rows + self.bias.to(rows)

    @property
    def is_finite(self) -> bool:
        return self.known_finite or is_finite(self.weight)

    @property
    def is_linear(self) -> bool:
        """True if the weight alone makes the vectors: no QK-norm, no inner norm."""
        return self.norm is None and self.low_rank is None

    def linearised(self) -> Float[Tensor, "d_head d_model"]:
        """The matrix nearest to this map on white inputs: norms divide by their root mean square there."""
        weight = self.weight
        if self.low_rank is not None:
            inner = self.low_rank.norm.linearised(self.low_rank.down) if self.low_rank.norm else self.low_rank.down
            rows = widen(self.low_rank.up) @ widen(inner)
            weight = torch.cat([rows, weight[len(rows) :].to(rows)])
        if self.norm is None:
            return weight
        return self.norm.linearised(weight, over=self.whole.weight if self.whole else None)

    def folded(self) -> "Projection":
        """The same map as a function of the normalised input."""
        if self.input_norm is None:
            return self
        weight, bias = self.input_norm.fold(self.weight, self.bias)
        whole, low_rank = self.whole, self.low_rank
        if whole is not None:
            whole = Whole(*self.input_norm.fold(whole.weight, whole.bias))
        if low_rank is not None:
            down, down_bias = self.input_norm.fold(low_rank.down, low_rank.down_bias)
            bias = _direct_rows_only(bias, self.bias, low_rank.up.shape[0])
            low_rank = replace(low_rank, down=down, down_bias=down_bias)
        changed = dict(weight=weight, bias=bias, input_norm=None, whole=whole, low_rank=low_rank, known_finite=False)
        return replace(self, **changed)


def widen(weight: Tensor) -> Tensor:
    """float64 stays, anything lower becomes float32: 16-bit products would lose the moments."""
    return weight if weight.dtype == torch.float64 else weight.float()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded (a DTensor): gathering it is a collective call."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b in the precision of x, whatever the weights are stored in."""
    return linear(x, weight.to(x), None if bias is None else bias.to(x))


def _direct_rows_only(folded: Tensor | None, stored: Tensor | None, num_rows: int) -> Tensor | None:
    """The norm's bias reaches the low-rank rows through `down`, so only the direct rows take it here."""
    if folded is None:
        return None
    kept = torch.zeros_like(folded[:num_rows]) if stored is None else stored[:num_rows].to(folded)
    return torch.cat([kept, folded[num_rows:]])


def is_finite(weight: Tensor) -> bool:
    """Tell whether all entries are finite, in one pass without a copy: a sum carries any NaN or infinity.

    A finite weight whose sum overflows is looked at again, entry by entry.
    """
    weight = weight.detach()
    return bool(torch.isfinite(weight.sum())) or bool(torch.isfinite(weight).all())


def size(tensor: Tensor) -> str:
    """The shape in words, for refusals."""
    return "×".join(map(str, tensor.shape)) or "a scalar"
