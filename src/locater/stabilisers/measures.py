"""The numbers that a logger gets: ξ, η and tr W/λ of each layer or each head."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spectra import moments_of
from .base import layer_key
from .energy import Terms
from .gradients import gram_matrices
from .live.pairs import Pair
from .live.sharding import part_of
from .scales import Eta


@torch.no_grad()
def pair_metrics(pairs: Sequence[Pair], gains: Sequence[Tensor | None], *, heads: bool) -> dict[str, float]:
    """`qk/layer_03/xi`: the mean over a layer's heads; with `heads`, `qk/layer_03/head_05/xi` as well."""
    several = len({pair.block for pair in pairs}) > 1
    found: dict[tuple[str, str], list[float]] = {}
    single: dict[str, float] = {}
    for pair, gain in zip(pairs, gains, strict=True):
        layer = layer_key(pair.block, pair.layer, several=several)
        for name, values in _numbers(pair, gain).items():
            found.setdefault((layer, name), []).extend(values)
            named = {f"qk/{layer}/head_{pair.first + n:02d}/{name}": value for n, value in enumerate(values)}
            single |= named if heads else {}
    means = {f"qk/{layer}/{name}": sum(values) / len(values) for (layer, name), values in found.items()}
    return means | single


def _numbers(pair: Pair, gain: Tensor | None) -> dict[str, list[float]]:
    part = part_of(pair, pair.weights())
    folded = Terms(Eta(), 0.0, gain=gain).fold(part)
    moments = moments_of(part.complete(gram_matrices(*folded)), d_model=pair.d_model)
    numbers = {"xi": moments.xi, "eta": moments.eta, "trace": moments.trace / pair.temperature}
    return {name: part.everywhere(values).flatten().tolist() for name, values in numbers.items()}
