"""Report of a monitor: per layer and head, with metrics to log, alarms, and what it left out."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ..attention import NAMES
from ..errors import counted
from ..head import Block
from ..models.coverage import spans
from ..records import Json, data_frame, head_key, layer_key
from ..report.shown import Shown
from ..report.stories import SERIOUS as SERIOUS
from .tally import (
    CLUSTERS,
    COUNT,
    COUNT_SQUARE,
    LOG_KEYS,
    LOOKED_AT,
    MODES,
    PASSES,
    RANKS,
    SUM,
    SUM_COUNT,
    SUM_SQUARE,
    THERE,
    WITH_ONE_KEY,
    WITHOUT_KEYS,
    Tally,
)

if TYPE_CHECKING:
    import pandas

MODULE_INPUTS = "module inputs"  # where a layer was reconstructed from what its projections were given
# Heads at rest do not mean divergence, as SERIOUS alarms do: trained models have them for good reasons.
RESTING = ("dead heads (sink)", "dead heads (uniform)")
LARGEST = ("sigma_1", "logit_bound", "update_ratio")  # of a layer the largest head's; of other numbers the mean
PLACELESS = ("near_mass", "mean_distance")  # in cross-attention, queries and keys share no positions


@dataclass(frozen=True)
class LayerReport:
    """One layer: the mean over queries of every statistic of every head, `max_logit` the largest of all queries."""

    block: Block
    layer: int
    heads: tuple[int, ...]
    statistics: dict[str, tuple[float, ...]]  # NaN where no query had any
    standard_errors: dict[str, tuple[float, ...]]  # 0 where every query was looked at
    ranks: dict[str, float]
    num_queries: int  # looked at, over all texts
    share_of_queries: float
    rows_without_keys: int  # left out of every mean: padding, or fully masked
    rows_with_one_key: int  # left out of the normalised entropy
    rows_not_finite: int  # left out of every mean: in the worst head, rows whose logits are NaN or infinite
    num_passes: int
    log_keys: float  # the mean over queries of log n: what thresholds are measured in
    through: str = ""  # the kernel whose call was read, or "softmax", or "module inputs" where none was seen
    weights: dict[str, tuple[float, ...]] = field(default_factory=dict)  # of the heads' weights: see `monitor.weights`
    module: str = ""  # the name of the attention module in the model; "#1" behind it for its second call in a pass

    @classmethod
    def of(
        cls, block: Block, layer: int, heads: tuple[int, ...], tally: Tally, through: str = "", module: str = ""
    ) -> "LayerReport":
        counts = tally.counts.tolist()
        sums, found = tally.statistics[..., SUM], tally.statistics[..., COUNT]
        values = dict(zip(NAMES, (sums / found).tolist(), strict=True))
        values["max_logit"] = [value if math.isfinite(value) else math.nan for value in tally.maximum.tolist()]
        seen = counts[LOOKED_AT] / max(1.0, counts[THERE])
        errors = dict(zip(NAMES, _errors(tally, seen), strict=True))
        errors.pop("max_logit")  # the largest of a sample has no such error: it is a lower bound
        names = [name for name in NAMES if block != "cross" or name not in PLACELESS]
        ranks = {name: float(total / count) for name, (total, count) in zip(RANKS, tally.ranks, strict=True) if count}
        rows = max(1.0, counts[LOOKED_AT])
        # A row with keys has an entropy, unless its logits have none.
        lost = counts[LOOKED_AT] - counts[WITHOUT_KEYS] - found[NAMES.index("entropy")].min().item()
        return cls(
            block, layer, heads,
            {name: tuple(values[name]) for name in names},
            {name: tuple(errors[name]) for name in names if name in errors},
            ranks, int(counts[LOOKED_AT]), seen, int(counts[WITHOUT_KEYS]), int(counts[WITH_ONE_KEY]), int(lost),
            int(counts[PASSES]), counts[LOG_KEYS] / rows, through, module=module,
        )  # fmt: skip

    @property
    def key(self) -> str:
        """Name of the layer, the same in every report."""
        return f"{self.block} {self.layer}"

    def mean(self, name: str) -> float:
        """Over the heads that have it; of `max_logit` the largest."""
        known = [value for value in self.statistics[name] if not math.isnan(value)]
        if not known:
            return math.nan
        return max(known) if name == "max_logit" else sum(known) / len(known)

    def of_weights(self, name: str) -> float:
        """A number of the heads' weights, of the whole layer: the largest where a largest is meant, else the mean."""
        known = [value for value in self.weights[name] if not math.isnan(value)]
        if not known:
            return math.nan
        return max(known) if name in LARGEST else sum(known) / len(known)

    def to_json(self) -> Json:
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, dict)}
        return {
            **plain,
            "heads": list(self.heads),
            "statistics": {name: [_known(value) for value in values] for name, values in self.statistics.items()},
            "standard_errors": {n: [_known(value) for value in values] for n, values in self.standard_errors.items()},
            "ranks": {name: _known(value) for name, value in self.ranks.items()},
            "weights": {name: [_known(value) for value in values] for name, values in self.weights.items()},
        }


@dataclass(frozen=True)
class Alarm:
    """One finding for the heads of a layer that share it: the worst figure beside the threshold, and what to try."""

    kind: str
    block: Block
    layer: int
    heads: tuple[int, ...]  # none where it is of the whole layer
    figure: float
    threshold: float
    meaning: str
    remedy: str
    trend: str = ""
    mode: str = "training"
    since: int | None = None  # the step whose report raised it, where it was said before

    @property
    def place(self) -> str:
        heads = f", head{'s' if len(self.heads) > 1 else ''} {spans(self.heads)}" if self.heads else ""
        mode = {"evaluation": ", in evaluation", "no_grad": ", without gradients"}.get(self.mode, "")
        return f"{self.block} layer {self.layer}{heads}{mode}"

    def __str__(self) -> str:
        """In full the first time; then that it is still so."""
        where = self.place
        if self.since is not None:
            return f"{self.kind}: {where}, still, since step {self.since} ({self.figure:.4g})"
        trend = f", {self.trend}" if self.trend else ""
        return f"{self.kind}: {where}, {self.meaning}{trend}; try {self.remedy}"

    def to_json(self) -> Json:
        return asdict(self)


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """`training`, `no_grad` and `evaluation` hold the layers observed in that mode; `alarms` name what is wrong."""

    step: int
    training: tuple[LayerReport, ...]
    evaluation: tuple[LayerReport, ...] = ()
    alarms: tuple[Alarm, ...] = ()
    notes: tuple[str, ...] = ()
    no_grad: tuple[LayerReport, ...] = ()  # in training mode without gradients: old policies, references, probes
    per_head: bool = field(default=False, repr=False)
    actions: tuple[str, ...] = ()  # what was done about alarms since the last report, why, and what it changed

    def metrics(self) -> dict[str, float]:
        """Flat names and numbers for a logger: `attn/layer_03/entropy`, `attn_eval/…`; heads only on request."""
        found = dict(_metrics(self.training, "attn", self.per_head))
        found |= dict(_metrics(self.no_grad, "attn_no_grad", self.per_head))
        found |= dict(_metrics(self.evaluation, "attn_eval", self.per_head))
        return found | {"attn/alarms": float(len(self.alarms)), "attn/actions": float(len(self.actions))}

    def headline(self) -> dict[str, float]:
        """Three numbers for a console: the largest logit, the lowest normalised entropy, and how many alarms."""
        layers = self.training or self.no_grad or self.evaluation
        known = {
            name: [value for layer in layers for value in layer.statistics[name] if not math.isnan(value)]
            for name in ("max_logit", "normalised_entropy")
        }
        found = {"attn/max_logit": max(known["max_logit"], default=math.nan)}
        found |= {"attn/normalised_entropy": min(known["normalised_entropy"], default=math.nan)}
        return found | {"attn/alarms": float(len(self.alarms))}

    def to_json(self) -> Json:
        return {
            "schema": "locater.monitor/1",
            "step": self.step,
            "training": [layer.to_json() for layer in self.training],
            "no_grad": [layer.to_json() for layer in self.no_grad],
            "evaluation": [layer.to_json() for layer in self.evaluation],
            "alarms": [alarm.to_json() for alarm in self.alarms],
            "actions": list(self.actions),
            "notes": list(self.notes),
        }

    def worst(self, name: str = "max_logit", count: int = 5) -> list[Json]:
        """The heads with the largest value of a statistic (the smallest of an entropy), a row each."""
        rows = [row for row in self._rows() if not math.isnan(row.get(name, math.nan))]
        return sorted(rows, key=lambda row: row[name] if "entropy" in name else -row[name])[:count]

    def to_frame(self) -> "pandas.DataFrame":
        """A pandas DataFrame, a row per head: mode, block, layer, head, statistics and numbers of the weights."""
        return data_frame(list(self._rows()))

    def _rows(self) -> Iterator[Json]:
        for mode in MODES:
            for layer in getattr(self, mode):
                for position, head in enumerate(layer.heads):
                    place = {"step": self.step, "mode": mode, "block": layer.block, "layer": layer.layer, "head": head}
                    place |= {"module": layer.module}
                    columns = {**layer.statistics, **layer.weights}
                    yield place | {name: values[position] for name, values in columns.items()}

    def summary(self) -> str:
        """The alarms, what was done about them, and notes, in plain words."""
        count = len({(layer.block, layer.layer) for mode in MODES for layer in getattr(self, mode)})
        quiet = f"no alarm in {counted(count, 'layer')}" if count else "nothing was seen"
        return "\n".join([*self.told(), *self.actions, *self.notes]) or quiet

    def told(self) -> Iterator[str]:
        """A sentence for each alarm; advice that several share stands in the first of them."""
        said = set[str]()
        for alarm in self.alarms:
            words, advice = str(alarm), f"; try {alarm.remedy}"
            yield words.removesuffix(advice) if advice in said else words
            said |= {advice} if words.endswith(advice) else set()


def _metrics(layers: tuple[LayerReport, ...], prefix: str, per_head: bool) -> Iterator[tuple[str, float]]:
    several = len({layer.block for layer in layers}) > 1
    for layer in layers:
        place = f"{prefix}/{layer_key(layer.layer, block=layer.block if several else '')}"
        numbers = {name: layer.mean(name) for name in layer.statistics} | layer.ranks
        numbers |= {name: layer.of_weights(name) for name in layer.weights}
        if per_head:
            for name, values in {**layer.statistics, **layer.weights}.items():
                numbers |= {f"{head_key(head)}/{name}": v for head, v in zip(layer.heads, values, strict=True)}
        yield from ((f"{place}/{name}", value) for name, value in numbers.items() if not math.isnan(value))


def _errors(tally: Tally, seen: float) -> list[list[float]]:
    """The standard error of each mean, by draws: see `attention.mean_over_queries`."""
    parts = tally.statistics.unbind(-1)
    value = parts[SUM] / parts[COUNT]
    square = parts[SUM_SQUARE] - 2 * value * parts[SUM_COUNT] + value.square() * parts[COUNT_SQUARE]
    draws = float(tally.counts[CLUSTERS])
    square = square.clamp(min=0) * draws / max(1.0, draws - 1) * max(0.0, 1 - seen)
    return (square.sqrt() / parts[COUNT]).tolist()


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
