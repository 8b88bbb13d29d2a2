"""When attention goes wrong: a few conditions, each with a threshold that does not depend on the length of the text."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..head import Block
from .report import LayerReport

Finding = tuple[str, float, float, str, str]  # kind, figure, threshold, meaning, remedy


@dataclass(frozen=True)
class Thresholds:
    """What counts as wrong. None switches an alarm off; what each means stands in docs/monitor.md."""

    entropy_collapse: float | None = 0.02  # normalised entropy below: n^0.02 keys hold the mass, hardly more than one
    rank_collapse: float | None = 0.05  # residual below: 99.75 % of the squared norm is common to all tokens
    logit_explosion: float | None = 10.0  # largest logit above this many log n, each enough to outweigh n keys
    dead_uniform: float | None = 0.9995  # normalised entropy above: logits as good as equal
    dead_sink: float | None = 0.99  # mass on the first token above: whatever the text says
    not_finite: float | None = 0.0  # share of queries above whose logits are NaN or infinite


@dataclass(frozen=True)
class Alarm:
    """One finding, with its place, its figure beside the threshold, and what to try."""

    kind: str
    block: Block
    layer: int
    head: int | None
    figure: float
    threshold: float
    meaning: str
    remedy: str
    mode: str = "training"

    def __str__(self) -> str:
        place = f"{self.block} layer {self.layer}" + ("" if self.head is None else f", head {self.head}")
        return f"{self.kind} in {place}: {self.meaning}; try {self.remedy}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_alarms(layers: Iterable[LayerReport], thresholds: Thresholds, *, mode: str = "training") -> list[Alarm]:
    """Every alarm of these layers, heads in order."""
    return [
        Alarm(kind, layer.block, layer.layer, head, figure, threshold, meaning, remedy, mode)
        for layer in layers
        for head, (kind, figure, threshold, meaning, remedy) in _findings(layer, thresholds)
    ]


def _findings(layer: LayerReport, limits: Thresholds) -> Iterator[tuple[int | None, Finding]]:
    for position, head in enumerate(layer.heads):
        values = {name: numbers[position] for name, numbers in layer.statistics.items()}
        yield from ((head, finding) for finding in _head(layer, values, limits))
    yield from ((None, finding) for finding in _layer(layer, limits))


def _head(layer: LayerReport, values: dict[str, float], limits: Thresholds) -> Iterator[Finding]:
    entropy, sink = values["normalised_entropy"], values["sink_mass"]
    if limits.entropy_collapse is not None and entropy < limits.entropy_collapse:
        meaning = f"normalised entropy {entropy:.4f} is below {limits.entropy_collapse}: each query sees one key"
        remedy = "a lower learning rate, a longer warm-up, QK-norm, or LocAteR to shrink the spectrum"
        yield "entropy collapse", entropy, limits.entropy_collapse, meaning, remedy
    if limits.dead_uniform is not None and entropy > limits.dead_uniform:
        meaning = f"normalised entropy {entropy:.5f} is above {limits.dead_uniform}: the content of keys does not count"
        remedy = "less weight decay on queries and keys, or LocAteR with a trace away from 0"
        yield "dead head (uniform)", entropy, limits.dead_uniform, meaning, remedy
    if limits.dead_sink is not None and layer.block != "cross" and sink > limits.dead_sink and layer.log_keys > 1:
        meaning = f"{sink:.4f} of the mass is on the first token, above {limits.dead_sink}: no signal from the text"
        remedy = "to prune it, or an output gate or a learned sink, so that heads can rest without one"
        yield "dead head (sink)", sink, limits.dead_sink, meaning, remedy
    yield from _logits(layer, values["max_logit"], limits.logit_explosion)


def _logits(layer: LayerReport, largest: float, times: float | None) -> Iterator[Finding]:
    limit = math.inf if times is None else times * max(1.0, layer.log_keys)
    if largest > limit:
        meaning = f"the largest logit {largest:.1f} is above {limit:.1f} = {times:g} log n"
        remedy = "QK-clip, QK-norm or a soft-cap, and a lower learning rate"
        yield "logit explosion", largest, limit, meaning, remedy


def _layer(layer: LayerReport, limits: Thresholds) -> Iterator[Finding]:
    lost = layer.rows_not_finite / max(1, layer.num_queries)
    if limits.not_finite is not None and lost > limits.not_finite:
        meaning = f"the logits of {layer.rows_not_finite} of {layer.num_queries} queries are NaN or infinite"
        remedy = "the last good checkpoint with a lower learning rate; the first layer named is where to look"
        yield "not finite", lost, limits.not_finite, meaning, remedy
    residual = layer.ranks.get("residual", math.nan)
    if limits.rank_collapse is not None and residual < limits.rank_collapse:
        cosine = layer.ranks.get("mean_cosine", math.nan)
        meaning = (
            f"residual {residual:.4f} is below {limits.rank_collapse} (mean cosine {cosine:.4f}): tokens are alike"
        )
        remedy = "larger residual branches or fewer layers, pre-LN, or LocAteR to localise attention"
        yield "rank collapse", residual, limits.rank_collapse, meaning, remedy
