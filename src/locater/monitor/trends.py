"""Numbers that change from report to report: of each head's weights, where alarms begin long before logits show it,
and growth, as a rate per step.

Weights are measured through d_h×d_h products, without any d×d matrix. Per layer: a few products of O(d·d_h²) per head.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..attention.layers import bounds_of, with_gain
from ..errors import Refusal
from ..head import Head
from ..records import State
from ..spectra import gram_products, moments_of, spectral_entropy, stable_rank, update_singular_values
from ..spectra.singular import singular_values_of_grams
from .observation import Observation
from .report import LayerReport

KEPT = 2  # reports whose numbers are remembered
GROWING = ("max_logit", "eta", "sigma_1")
ROUNDING = 0.01  # logits of 16 bits may exceed a bound by so much of it

Moment = tuple[int, dict[str, list[float]]]


@dataclass
class Trends:
    """The last two reports' numbers of every layer's heads, in training."""

    moments: dict[str, list[Moment]] = field(default_factory=dict)

    def add(self, step: int, layers: Iterable[LayerReport]) -> None:
        for layer in layers:
            known = {**layer.statistics, **layer.weights}
            kept = self.moments.setdefault(layer.key, [])
            if not kept or kept[-1][0] < step:
                kept.append((step, {name: list(known[name]) for name in GROWING if name in known}))
            del kept[:-KEPT]

    def growth(self, layer: LayerReport, name: str) -> list[float]:
        """Per head (log now − log before) / steps between the last two reports; NaN where that is not defined."""
        kept = [moment for moment in self.moments.get(layer.key, []) if name in moment[1]]
        if len(kept) < KEPT:
            return [math.nan] * len(layer.heads)
        (before, old), (now, new) = kept
        pairs = zip(new[name], old[name], strict=True)
        return [math.log(b / a) / (now - before) if a > 0 and b > 0 else math.nan for b, a in pairs]

    def with_growth(self, layer: LayerReport) -> LayerReport:
        rates = {f"{name}_growth": tuple(self.growth(layer, name)) for name in GROWING}
        known = {name: values for name, values in rates.items() if not all(map(math.isnan, values))}
        return replace(layer, weights=layer.weights | known)

    def describe(self, layer: LayerReport, name: str, heads: Collection[Any]) -> tuple[str, bool]:
        """Say how fast the fastest of some heads grows, and whether that is more than tenfold in 100 steps.

        So fast is no slow drift: steps are too large.
        """
        rates = zip(layer.heads, self.growth(layer, name), strict=True)
        fastest = max((rate for head, rate in rates if head in heads and not math.isnan(rate)), default=0.0)
        if 100 * fastest > math.log(10):
            return "growing more than tenfold in 100 steps", True
        return f"growing by {math.expm1(100 * fastest):+.0%} in 100 steps" if fastest > 0 else "", False

    def state_dict(self) -> State:
        return {"moments": self.moments}

    def load_state_dict(self, state: State) -> None:
        self.moments = {key: [(step, values) for step, values in kept] for key, kept in state["moments"].items()}


@dataclass(frozen=True, eq=False)
class WeightNumbers:
    """The weights of a layer's heads at one moment, the input norm's gain folded in."""

    query: Float[Tensor, "heads d_head d_model"]
    key: Float[Tensor, "heads d_head d_model"]
    heads: tuple[Head, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, heads: Sequence[Head]) -> "WeightNumbers | None":
        """Copy the weights of some heads as they are now; None where the weight of a projection is a product."""
        if not heads or any(side.low_rank is not None for head in heads for side in (head.query, head.key)):
            return None
        query, key = (torch.stack([getattr(head, side).weight.detach() for head in heads]) for side in ("query", "key"))
        return cls(with_gain(query, heads[0].query), with_gain(key, heads[0].key), tuple(heads))

    @torch.no_grad()
    def numbers(self, before: "WeightNumbers | None") -> dict[str, Float[Tensor, " heads"]]:
        """η, σ₁(W), the bound on logits, symmetry tr W²/‖W‖²; and of ΔW its size, stable rank and spectral entropy."""
        products = gram_products(self.query, self.key)
        sigma = singular_values_of_grams(products.query, products.key)
        numbers = {
            "eta": moments_of(products, d_model=self.query.shape[-1]).eta,
            "sigma_1": sigma[:, 0],
            "logit_bound": bounds_of(self.heads, products, sigma[:, 0], self.query.shape[-1]),
            "symmetry": products.trace_of_square / products.frobenius_squared,
        }
        if before is not None:
            update = update_singular_values(self.query, self.key, before.query, before.key)
            size = torch.linalg.vector_norm(update, dim=-1) / torch.linalg.vector_norm(sigma, dim=-1)
            numbers |= {
                "update_ratio": size,
                "update_stable_rank": stable_rank(update).where(size > 0, torch.nan),
                "update_entropy": spectral_entropy(update).where(size > 0, torch.nan),
            }
        return numbers


class WeightsOfHeads:
    """Measures the weights of the layers that an observation holds, and keeps a copy of them until the next report."""

    def __init__(self, seen: Observation) -> None:
        self.seen = seen
        self.before: dict[int, WeightNumbers] = {}

    def measured(self, layer: LayerReport, evaluation: Sequence[LayerReport]) -> LayerReport:
        """Add the numbers of a layer's weights to its report, where its heads are known."""
        if (index := self.seen.own_index(layer.block, layer.layer)) is None:
            return layer
        site = self.seen.sites[index]
        heads = self.seen.found.heads(site)
        now = WeightNumbers.of([head for head in heads if head.index in layer.heads])
        if now is None or len(now.query) != len(layer.heads):
            return layer
        before, self.before[index] = self.before.get(index), replace(now, heads=())
        try:
            numbers = {name: tuple(values.tolist()) for name, values in now.numbers(before).items()}
        except Refusal as reason:  # so large that their moments overflow: that is for the alarms to tell
            self.seen.refused.add(f"{layer.block} layer {layer.layer}: {reason}")
            return layer
        others = [one for one in evaluation if one.key == layer.key]
        bounds, note = standing_bounds(numbers["logit_bound"], (layer, *others), self.seen.found.difference(site))
        self.seen.refused.update(note)
        return replace(layer, weights=numbers | {"logit_bound": bounds})


def standing_bounds(
    bounds: Sequence[float], measured: Sequence[LayerReport], differs: str | None
) -> tuple[tuple[float, ...], list[str]]:
    """Bounds on logits without those that nothing stands behind, NaN in their place; and a note why.

    A bound is of the heads as they were read, with the weights as they are now. It is withdrawn where the heads differ
    from the calls, and where a larger logit was measured.
    """
    layer = measured[0]
    place = f"{layer.block} layer {layer.layer}"
    if differs is not None:
        words = f"{place}: its heads, as they are read, are not those of its calls ({differs})"
        return tuple(math.nan for _ in bounds), [f"{words}; its bounds on logits are withdrawn"]
    largest = [max(values) for values in zip(*(one.statistics["max_logit"] for one in measured), strict=True)]
    broken = [n for n, bound in enumerate(bounds) if largest[n] > bound * (1 + ROUNDING)]
    if not broken:
        return tuple(bounds), []
    first = broken[0]
    words = f"{place}: a logit of {largest[first]:.4g} in head {layer.heads[first]}, where its weights now bound it by"
    kept = tuple(math.nan if n in broken else bound for n, bound in enumerate(bounds))
    return kept, [f"{words} {bounds[first]:.4g}; the bounds of {len(broken)} heads are withdrawn"]
